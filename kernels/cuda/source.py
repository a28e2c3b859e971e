"""A digest of what is compiled, by which a table of figures says what it was made from."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.cuda.specimen import Specimen


def digest(specimen: Specimen) -> str:
    """8 hex digits of the kernel's code, of all it calls, its constants and launch options;
    comments, docstrings and layout do not count."""
    # Named as it was when the tables were first written: another name would be another digest.
    options = sorted({**specimen.constants, "FP8": specimen.cache}.items())
    launch = (options, specimen.num_warps, specimen.num_stages, sorted(specimen.types.items()))
    code = f"{_code(specimen.kernel)}\n{launch!r}"
    return hashlib.sha256(code.encode()).hexdigest()[:8]


@cache
def _code(kernel: Any) -> str:
    return "\n".join(_codes(kernel, set()))


def _codes(kernel: Any, seen: set[str]) -> list[str]:
    function = kernel.fn
    if function.__qualname__ in seen:
        return []
    seen.add(function.__qualname__)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    codes = [ast.unparse(tree)]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(names):
        called = function.__globals__.get(name)
        if hasattr(called, "fn") and called.fn.__module__.startswith("kernels."):
            codes += _codes(called, seen)
    return codes
