"""Tensors of the Open Inference Protocol: what there are, and their elements on the wire.

Plain values only. Raw elements are little-endian and without a gap; one of BYTES has its
length before it, in four bytes.
https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_INPUT = "text_input"
SAMPLING_PARAMETERS = "sampling_parameters"
STREAM = "stream"
EXCLUDE_INPUT = "exclude_input_in_output"
TEXT_OUTPUT = "text_output"
FINISH_REASON = "finish_reason"
NUM_INPUT_TOKENS = "num_input_tokens"
NUM_OUTPUT_TOKENS = "num_output_tokens"

ASKED_BY = {
    "return_finish_reason": FINISH_REASON,
    "return_num_input_tokens": NUM_INPUT_TOKENS,
    "return_num_output_tokens": NUM_OUTPUT_TOKENS,
}
"""The inputs that add an output."""
OPTIONS = (STREAM, EXCLUDE_INPUT, *ASKED_BY)
"""The inputs that are BOOL."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    name: str
    datatype: str
    shape: tuple[int, ...]
    """-1 is any size."""


INPUTS = {
    kind.name: kind
    for kind in (
        TensorKind(TEXT_INPUT, "BYTES", (1,)),
        TensorKind(SAMPLING_PARAMETERS, "BYTES", (1,)),
        *(TensorKind(name, "BOOL", (1,)) for name in OPTIONS),
    )
}
"""As Triton's vLLM backend names them; all but text_input are optional."""
OUTPUTS = {
    kind.name: kind
    for kind in (
        TensorKind(TEXT_OUTPUT, "BYTES", (-1,)),
        TensorKind(FINISH_REASON, "BYTES", (-1,)),
        TensorKind(NUM_INPUT_TOKENS, "UINT32", (1,)),
        TensorKind(NUM_OUTPUT_TOKENS, "UINT32", (-1,)),
    )
}


def read_raw(kind: TensorKind, raw: bytes) -> bytes | bool:
    """The single element of an input. Raises InvalidRequest that names the tensor."""
    if kind.datatype == "BOOL":
        if raw not in (b"\0", b"\1"):
            raise InvalidRequest(
                kind.name, f"{kind.name} has {len(raw)} raw bytes, must be one of 0 or 1"
            )
        return raw == b"\1"
    length = int.from_bytes(raw[:4], "little") if len(raw) >= 4 else -1
    if length != len(raw) - 4:
        raise InvalidRequest(
            kind.name,
            f"{kind.name} has {len(raw)} raw bytes, which are not one element with its length",
        )
    return raw[4:]


def write_raw(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(it)) + it for it in values)
    assert datatype == "UINT32", "no output has another type"
    return struct.pack(f"<{len(values)}I", *values)
