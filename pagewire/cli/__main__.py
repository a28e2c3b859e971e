from __future__ import annotations

from pagewire.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
