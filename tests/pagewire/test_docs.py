"""Documentation that says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from frontend.metrics import Metrics
from frontend.openai.errors import STATUS as HTTP_STATUS
from frontend.openai.requests import ChatBody, CompletionBody
from frontend.status import STATUS
from pagewire.config import ServeConfig
from pagewire.settings import flag_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ("README.md", "docs/api.md", "docs/operations.md", "docs/decisions.md", "CONTRIBUTING.md")


def test_the_status_table_is_the_one_in_the_code() -> None:
    pattern = r"^\| `(\w+)` \| ([A-Z_]+) \| (\d+) \|"
    rows = re.findall(pattern, (ROOT / "docs/api.md").read_text(), re.M)
    told = {code: (status.name, str(HTTP_STATUS[code])) for code, status in STATUS.items()}
    assert {code: (grpc, http) for code, grpc, http in rows} == told
    assert len(rows) == len(STATUS)


def test_the_metrics_table_is_what_is_exported() -> None:
    source = "".join(path.read_text() for path in (ROOT / "frontend").rglob("*.py"))
    exported = set(re.findall(r'"((?:vllm:|pagewire_)\w+)"', source))
    assert "vllm:time_to_first_token_seconds" in exported
    assert "pagewire_rpcs_handled_total" in Metrics().exposition().decode()
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("## Metrics") : text.index("## Logs")]
    assert set(re.findall(r"`((?:vllm:|pagewire_)\w+)`", section)) == exported


@pytest.mark.parametrize("name", DOCS)
def test_flags_in_the_docs_exist(name: str) -> None:
    others = {
        "--config", "--help", "--temperature", "--max-tokens", "--chat", "--json", "--build",
        "--wait", "--follow", "--no-reflection", "--no-enable-prefix-caching", "--tenant",
        "--tls-ca", "--api-key",
    }  # fmt: skip
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / name).read_text()))
    bench = re.findall(r'"(--[a-z-]+)"', (ROOT / "pagewire/cli/bench_flags.py").read_text())
    known = {flag_name(field) for field in ServeConfig.model_fields} | others | {*bench}
    assert flags - known == set()


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
        if not target.startswith("https://"):
            assert ((ROOT / name).parent / target).exists(), target


def test_every_field_of_a_body_is_named() -> None:
    text = (ROOT / "docs/api.md").read_text()
    section = text[text.index("## HTTP") :]
    named = set(re.findall(r"`(\w+)`", section))
    for body in (CompletionBody, ChatBody):
        nothing = {f.name for f in msgspec.structs.fields(body) if f.type is type(None)}
        assert set(body.__struct_fields__) - nothing - {"modalities"} - named == set()
