"""Who may import what: the rules that import-linter's contracts cannot say."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("pagewire", "frontend", "tokenizer_svc", "engine_core", "kernels")

# Our messages become plain values in these files, and are made from them there.
MESSAGE_HOMES = {
    "pagewire/client/convert.py",
    "pagewire/bench/grpc_target.py",
    "frontend/convert/answers.py",
    "frontend/convert/calls.py",
    "frontend/convert/tokenizer.py",
    "frontend/kserve/convert.py",
    "frontend/vllm_engine/convert.py",
    "tokenizer_svc/convert.py",
}
# A servicer or a client's stream may name a message's type in an annotation, and no more.
ANNOTATION_HOMES = {
    "pagewire/client/aio.py",
    "pagewire/client/received.py",
    "pagewire/client/sync.py",
    "frontend/admin_servicer.py",
    "frontend/kserve/servicer.py",
    "frontend/model_servicer.py",
    "frontend/servicer.py",
    "frontend/tokenizer_servicer.py",
    "frontend/vllm_engine/servicer.py",
    "tokenizer_svc/servicer.py",
}
STUB_HOMES = ANNOTATION_HOMES | {
    "pagewire/bench/grpc_target.py",
    "frontend/server.py",
    "frontend/tokenizer_client.py",
    "frontend/vllm_engine/protocol.py",
    "tokenizer_svc/server.py",
}
MESSAGE_PACKAGES = ("pagewire.v1.", "pagewire.kserve.", "smg_grpc_proto.")


def sources() -> Iterator[str]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(("pagewire/v1/", "pagewire/kserve/")):
                yield name


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text())


@cache
def imports(name: str, *, for_annotations: bool = True) -> tuple[str, ...]:
    """Every module that the file imports anywhere, as a dotted name; on demand
    without those under `if TYPE_CHECKING`."""
    found: list[str] = []
    for statement in parsed(name).body:
        if not for_annotations and is_type_checking(statement):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                found += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def importers_of_ours(suffix: str, *, for_annotations: bool) -> set[str]:
    """The files that import a generated module whose name ends so."""
    return {
        name
        for name in sources()
        for module in imports(name, for_annotations=for_annotations)
        if module.startswith(MESSAGE_PACKAGES) and module.endswith(suffix)
    }


def uses_torch_cuda(name: str) -> bool:
    by_attribute = any(
        isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        for node in ast.walk(parsed(name))
    )
    return by_attribute or any(module.startswith("torch.cuda") for module in imports(name))


def run_python(code: str) -> str:
    """What `code` prints in a process of its own, started at the repository's root."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_torch_cuda_stays_in_the_device_and_the_cuda_kernels() -> None:
    homes = ("engine_core/device/", "kernels/cuda/")
    assert [n for n in sources() if uses_torch_cuda(n) and not n.startswith(homes)] == []


def test_triton_stays_in_the_cuda_kernels() -> None:
    strangers = [
        name
        for name in sources()
        if not name.startswith("kernels/cuda/")
        and any(module.split(".")[0] == "triton" for module in imports(name))
    ]
    assert strangers == []


def test_our_messages_stop_at_the_conversions() -> None:
    assert importers_of_ours("_pb2", for_annotations=False) == MESSAGE_HOMES
    everywhere = importers_of_ours("_pb2", for_annotations=True)
    assert everywhere - MESSAGE_HOMES - ANNOTATION_HOMES == set()


def test_grpc_stubs_stop_at_servers_and_clients() -> None:
    assert importers_of_ours("_pb2_grpc", for_annotations=True) - STUB_HOMES == set()


def test_nothing_is_pickled_between_processes() -> None:
    strangers = [
        name
        for name in sources()
        if any(
            module.split(".")[0] in {"pickle", "cloudpickle", "dill"} for module in imports(name)
        )
    ]
    assert strangers == []


@pytest.mark.parametrize("room", ["frontend", "tokenizer_svc", "pagewire"])
def test_a_room_without_tensors_never_imports_torch(room: str) -> None:
    code = f"""
import importlib, pkgutil, sys
package = importlib.import_module({room!r})
names = [m.name for m in pkgutil.walk_packages(package.__path__, {room!r} + ".")]
assert names
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print([m for m in ("torch", "triton", "engine_core", "kernels") if m in sys.modules])
"""
    assert run_python(code) == "[]"


def test_client_commands_start_without_heavy_imports() -> None:
    code = """
import sys
import pagewire.cli.chat, pagewire.cli.generate, pagewire.cli.models
heavy = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "zmq", "starlette")
print([m for m in heavy if m in sys.modules])
"""
    assert run_python(code) == "[]"


# `kernels` is also a package on PyPI that transformers looks for: it finds ours,
# and takes our version for that one's.


def test_kernels_package_is_empty() -> None:
    assert (ROOT / "kernels/__init__.py").read_bytes() == b""


def test_our_version_is_outside_the_window_that_transformers_acts_on() -> None:
    from importlib.metadata import version

    assert version("pagewire").rsplit(".", 1)[0] not in {"0.17", "0.18"}


def test_transformers_model_code_loads_beside_our_kernels() -> None:
    code = """
import sys
import kernels
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers import LlamaConfig
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, vocab_size=16)
LlamaForCausalLM(config)
print(kernels.__file__)
"""
    assert run_python(code) == str(ROOT / "kernels/__init__.py")
