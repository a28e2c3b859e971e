"""GPTQ (Frantar et al., 2022, arXiv:2210.17323) as AutoGPTQ and GPTQModel store it.

qweight [in * bits / 32, out], qzeros [groups, out * bits / 32] int32, scales [groups, out]
and g_idx [in], the group of each feature: with desc_act a group's features are those that
were quantized together, not neighbours. checkpoint_format gptq stores zeros less one,
modulo 2 ** bits; gptq_v2 stores them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_core.model.quantized.codes import IntegerCodes
from engine_core.model.quantized.scheme import (
    FLOAT_DTYPES,
    Exceptions,
    Kind,
    Options,
    StoredMatrix,
    TensorFile,
    matrices_by_qweight,
    read_scales,
    want_matrix,
    want_tensor,
)
from engine_core.model.quantized.words import unpack_columns
from pagewire.errors import ModelLoadError

_KNOWN = (
    *("quant_method", "bits", "group_size", "desc_act", "checkpoint_format", "format"),
    *("pack_dtype", "sym", "modules_to_not_convert"),
)
_WITHOUT_EFFECT = (
    *("act_group_aware", "backend", "batch_size", "block_name_to_quantize"),
    *("cache_block_outputs", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama"),
    *("exllama_config", "hessian", "hyb_act", "lm_head", "max_input_length", "meta"),
    *(
        "model_seqlen",
        "model_file_base_name",
        "model_name_or_path",
        "module_name_preceding_first_block",
    ),
    *("modules_in_block_to_quantize", "mse", "offload_to_disk", "pad_token_id", "static_groups"),
    *("tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "gptaq", "gptaq_alpha"),
    *("v2", "v2_alpha", "failsafe"),
)
"""Of how it was made, or of how another program is to compute it."""


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    group_size: int
    """-1: all features."""
    zeros_less_one: bool
    exceptions: Exceptions
    method: str = "gptq"

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset({self._kind})

    @property
    def _kind(self) -> Kind:
        return "int4" if self.bits == 4 else "int8"

    @classmethod
    def from_options(cls, options: Options) -> Gptq:
        """Raises ModelLoadError naming the file and the key."""
        options.refuse_others((*_KNOWN, *_WITHOUT_EFFECT))
        bits = options.one_of("bits", (4, 8))
        assert isinstance(bits, int)
        size = options.group_size("group_size")
        key = "checkpoint_format" if options.raw.get("checkpoint_format") else "format"
        stored = options.one_of(key, ("gptq", "gptq_v2"), default="gptq")
        options.one_of("pack_dtype", ("int32",), default="int32")
        names = options.exceptions("modules_to_not_convert")
        return cls(bits, size, stored == "gptq", names)

    def matrices(self, file: TensorFile) -> dict[str, StoredMatrix]:
        return matrices_by_qweight(file, self.exceptions, self._matrix)

    def _matrix(self, file: TensorFile, module: str) -> StoredMatrix:
        weight, zeros, scales, g_idx = (
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        in_words, out_features = want_matrix(file, weight)
        in_features = in_words * 32 // self.bits
        size = in_features if self.group_size == -1 else self.group_size
        groups = -(-in_features // size)
        want_tensor(file, weight, [(in_words, out_features)], ("I32",))
        want_tensor(file, zeros, [(groups, out_features * self.bits // 32)], ("I32",))
        want_tensor(file, scales, [(groups, out_features)], FLOAT_DTYPES)
        parts: tuple[str, ...] = (weight, zeros, scales)
        has_groups = g_idx in file.shapes()
        if has_groups:
            want_tensor(file, g_idx, [(in_features,)], ("I32", "I64"))
            parts = (*parts, g_idx)

        def read(device: torch.device) -> IntegerCodes:
            stored = unpack_columns(file.read(zeros, device), self.bits).T.to(torch.int16)
            if self.zeros_less_one:
                stored = (stored + 1) % (1 << self.bits)
            return IntegerCodes(
                unpack_columns(file.read(weight, device).T, self.bits),
                read_scales(file, scales, device).T.contiguous(),
                stored.contiguous(),
                size,
                read_groups(file, g_idx, size, groups, device) if has_groups else None,
            )

        return StoredMatrix((out_features, in_features), parts, self._kind, read)


def read_groups(
    file: TensorFile, name: str, group_size: int, num_groups: int, device: torch.device
) -> torch.Tensor | None:
    """The group of each feature; None where groups are neighbours. Raises ModelLoadError for
    a group that is not there."""
    groups = file.read(name, device).long()
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise ModelLoadError(
            f"{file.file_of(name)}: tensor {name} names a group outside of [0, {num_groups})"
        )
    in_order = torch.arange(groups.shape[0], device=device) // group_size
    return None if torch.equal(groups, in_order) else groups
