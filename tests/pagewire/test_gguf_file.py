"""The metadata of GGUF files against what the gguf package's writer was given."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import gguf
import pytest

from pagewire.errors import ModelLoadError
from pagewire.gguf_file import GgufFile

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [f"t{i}é" for i in range(3000)]
SCORES = [i / 8 for i in range(3000)]


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores(SCORES)
    writer.add_eos_token_id(7)
    writer.add_array("tokenizer.flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_arrays_are_whole_where_they_are_asked_for(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "m.gguf"))
    assert file.metadata["tokenizer.ggml.tokens"] is None
    assert file.read_metadata("tokenizer.") == {
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.flags": [True, False],
    }
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tokenizer\.ggml\.merges is missing"):
        file.read_array("tokenizer.ggml.merges")
    with pytest.raises(ModelLoadError, match="eos_token_id is not an array"):
        file.read_array("tokenizer.ggml.eos_token_id")


def test_text_that_is_not_utf8_in_an_array_that_was_stepped_over(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace("t2999é".encode(), b"t2999\xff\xff"))
    file = GgufFile(path)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: header text is not UTF-8"):
        file.read_array("tokenizer.ggml.tokens")


@pytest.mark.parametrize(("kind", "what"), [(9, "array of arrays"), (99, "value type 99")])
def test_arrays_of_what_is_unknown(tmp_path: Path, kind: int, what: str) -> None:
    key = b"deep"
    path = tmp_path / "m.gguf"
    path.write_bytes(
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, kind, 1)
    )
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: {what} near byte 52 is unknown"):
        GgufFile(path)
