"""What other architectures than Llama's ask of the CPU ops: windows, soft caps, head norms,
blocks without norm or rotation, GeGLU and experts; drawn at random, against float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.cpu.batch_invariant import BatchInvariantCpuOps
from kernels.cpu.library import Library, supported_variants
from kernels.inputs import Maker, attention_args, attention_batch, cos_sin_table, rope_args
from kernels.ops import AttentionBlock, Block, BlockBatch, KVCache, MlpBlock, MoeBlock
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import BACKENDS, VARIANTS, best_cpu_ops, cpu_ops
from tests.support.invariance import Attended, assert_attention_is_invariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.ops import Activation, LinearWeight, Ops

F32, F64 = torch.float32, torch.float64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE = 4
ATTENTION_SEEDS, BLOCK_SEEDS = range(36), range(24)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Most draws run on one thread: on a machine with other work a second one mostly waits."""
    before = torch.get_num_threads()
    callspec = getattr(request.node, "callspec", None)
    seed = callspec.params.get("seed", 1) if callspec is not None else 1
    torch.set_num_threads(2 if seed % 4 == 0 else 1)
    yield None
    torch.set_num_threads(before)


def dtype_of(seed: int) -> torch.dtype:
    """Each seed's draw is checked in one of the three."""
    return DTYPES[seed % 3]


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """In [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def one_of(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]


def widened(args: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in args.items()
    }


# Attention


def drawn_attention(seed: int) -> dict[str, Any]:
    draw, dtype = Draw(seed), dtype_of(seed)
    heads, kv_heads = draw.one_of([(4, 4), (6, 2), (5, 1), (16, 1)])
    # Decodes first, then chunks of some context.
    query_lens = [1] * draw.integer(0, 4)
    query_lens += [draw.integer(2, 90) for _ in range(draw.integer(0, 2) or not query_lens)]
    contexts = [draw.one_of([0, draw.integer(1, 40), draw.integer(60, 700)]) for _ in query_lens]
    seq_lens = [c + n for c, n in zip(contexts, query_lens, strict=True)]
    dim = draw.one_of([16, 64, 80, 10, 128])
    args = attention_args(Maker(dtype, seed=seed), query_lens, seq_lens, heads, kv_heads, dim)
    # Every window with every cap in every dtype.
    window, cap = divmod(seed // 3 % 12, 3)
    args["window"] = (None, 1, draw.integer(2, 70), draw.integer(64, 600))[window]
    args["soft_cap"] = (None, 0.5, 30.0)[cap]
    if args["soft_cap"] == 30.0:
        args["scale"] *= 12  # scores that the cap bends
    return args


@cache
def attended(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result, and the reference's in the seed's dtype."""
    args = drawn_attention(seed)
    return ReferenceOps(F64).attention(**widened(args)), ReferenceOps().attention(**args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", ATTENTION_SEEDS)
def test_attention(seed: int, backend: str) -> None:
    args = drawn_attention(seed)
    exact, fair = attended(seed)
    actual = cpu_ops(backend).attention(**args)
    label = f"window {args['window']} cap {args['soft_cap']} lens {args['batch'].seq_lens.tolist()}"
    assert_within_budget(actual, exact, fair, label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_attention_pairs_every_limit_with_every_kind_of_batch(dtype: torch.dtype) -> None:
    limited = set()
    for seed in ATTENTION_SEEDS:
        if dtype_of(seed) == dtype:
            args = drawn_attention(seed)
            batch = args["batch"]
            lens = zip(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist(), strict=True)
            for kind, seq_len in {
                ("decode" if query == 1 else "chunk", seq) for query, seq in lens
            }:
                limited.add((kind, "window", (args["window"] or seq_len) < seq_len))
                limited.add((kind, "cap", args["soft_cap"]))
    kinds = ("decode", "chunk")
    assert limited == {
        *((kind, "window", cuts) for kind in kinds for cuts in (False, True)),
        *((kind, "cap", cap) for kind in kinds for cap in (None, 0.5, 30.0)),
    }


@pytest.mark.parametrize("backend", VARIANTS)
def test_keys_outside_the_window_are_not_read(backend: str) -> None:
    """Their blocks may have been given away: NaN in them, and table entries of block 0."""
    window = 40
    args = attention_args(Maker(F32), [1, 1, 20], [700, 90, 130], 6, 2, 32)
    expected = cpu_ops(backend).attention(**args, window=window)
    batch = args["batch"]
    for row, (query_len, seq_len) in enumerate(zip([1, 1, 20], [700, 90, 130], strict=True)):
        gone = (seq_len - query_len + 1 - window) // 16
        assert gone > 0
        for block_id in batch.block_table[row, :gone].tolist():
            args["k_cache"][block_id] = args["v_cache"][block_id] = float("nan")
        batch.block_table[row, :gone] = 0
    assert torch.equal(cpu_ops(backend).attention(**args, window=window), expected)


@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize(
    ("window", "dtype"), [(7, DTYPES[0]), (100, DTYPES[1]), (600, DTYPES[2])], ids=str
)
def test_batch_invariant_attention_with_a_window(
    backend: str, window: int, dtype: torch.dtype
) -> None:
    cpu_ops(backend)  # builds it
    (variant,) = (v for v in supported_variants() if v.name == backend)

    class Limited(BatchInvariantCpuOps):
        def attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().attention(*args, **{**kwargs, "window": window, "soft_cap": 5.0})

    whole = Attended.make(dtype, 700, 4, 2, 32)
    assert_attention_is_invariant(Limited(Library(variant)), whole, [0, 16, 63, 64, 350, 699])


# Single ops


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_rope_and_cache(seed: int, backend: str) -> None:
    draw, dtype = Draw(seed), dtype_of(seed)
    tokens, kv_heads = draw.integer(1, 40), draw.integer(1, 3)
    dim = draw.one_of([8, 10, 64, 80])
    rotary_dim = draw.one_of([dim, 6])

    def make() -> dict[str, Any]:
        maker = Maker(dtype, seed=seed)
        args = rope_args(maker, tokens, 2 * kv_heads, kv_heads, dim, rotary_dim=rotary_dim)
        if seed % 4 != 3:
            args |= {"q_norm": maker.normal(dim), "k_norm": maker.normal(dim), "eps": 1e-5}
        if seed % 2:
            args["cos_sin"] = None
        return args

    def run(ops: Ops, args: dict[str, Any]) -> dict[str, torch.Tensor]:
        k = args["k"].clone()
        ops.rope_and_cache(**args)
        assert torch.equal(args["k"], k), "k is only read"
        return {name: args[name] for name in ("q", "k_cache", "v_cache")}

    table = make()["cos_sin"]
    exact = run(ReferenceOps(F64), widened(make()) | {"cos_sin": table})
    fair, actual = run(ReferenceOps(), make()), run(cpu_ops(backend), make())
    for name, value in actual.items():
        assert_within_budget(value, exact[name], fair[name], name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 63), (3, 65), (5, 1536), (0, 4)])
def test_gelu_tanh_mul(shape: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    gate_up = Maker(dtype).normal(shape[0], 2 * shape[1]) * 4
    exact = ReferenceOps(F64).gelu_tanh_mul(gate_up.double())
    actual = cpu_ops(backend).gelu_tanh_mul(gate_up)
    assert_within_budget(actual, exact, ReferenceOps().gelu_tanh_mul(gate_up), "gelu_tanh_mul")


@pytest.mark.parametrize("backend", VARIANTS)
def test_gelu_of_every_size_of_gate(backend: str) -> None:
    gate = torch.cat((torch.linspace(-30, 30, 4001), torch.tensor([0.0, -0.0, 1e-30, 1e4, -1e4])))
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    exact = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    actual = cpu_ops(backend).gelu_tanh_mul(gate_up)[0].double()
    # Far below zero even float64's 1 + tanh has few digits left.
    torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-12)


# Experts


def drawn_experts(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    draw, maker = Draw(seed), Maker(dtype, seed=seed)
    tokens, experts = draw.one_of([1, 2, 7, 40]), draw.integer(2, 9)
    hidden, inter = draw.one_of([(48, 64), (37, 51), (130, 32)])
    chosen = draw.integer(1, experts)
    ids = torch.stack([maker.permutation(experts)[:chosen] for _ in range(tokens)])
    return {
        "x": maker.normal(tokens, hidden + 3)[:, 2 : hidden + 2],
        "gate_up": maker.normal(experts, 2 * inter, hidden) / hidden**0.5,
        "down": maker.normal(experts, hidden, inter) / inter**0.5,
        "expert_ids": ids,
        "expert_scales": maker.normal(tokens, chosen, dtype=F32).softmax(dim=-1),
        "activation": draw.one_of(["silu", "gelu_tanh"]),
    }


def mixed(ops: Ops, args: dict[str, Any]) -> torch.Tensor:
    args = dict(args)
    gate_up, down = args.pop("gate_up"), args.pop("down")
    weights = ops.prepare_experts(gate_up, down)
    assert (weights.num_experts, weights.in_features) == (gate_up.shape[0], gate_up.shape[2])
    return ops.experts(weights=weights, **args)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_experts(seed: int, backend: str) -> None:
    args = drawn_experts(seed, dtype_of(seed))
    exact = mixed(ReferenceOps(F64), widened(args))
    fair, actual = mixed(ReferenceOps(), args), mixed(cpu_ops(backend), args)
    assert_within_budget(actual, exact, fair, f"experts {list(args['expert_ids'].shape)}")


@pytest.mark.parametrize("backend", VARIANTS)
def test_a_token_s_experts_do_not_depend_on_the_batch(backend: str, dtype: torch.dtype) -> None:
    args = drawn_experts(3, dtype)
    args["x"] = Maker(dtype).normal(30, args["x"].shape[1])
    experts = args["gate_up"].shape[0]
    args["expert_ids"] = torch.stack([torch.arange(2) * (1 + t % 3) % experts for t in range(30)])
    args["expert_ids"][:, 1] = (args["expert_ids"][:, 0] + 1) % experts
    args["expert_scales"] = torch.rand(30, 2, generator=torch.Generator().manual_seed(1))
    ops = cpu_ops(backend)
    together = mixed(ops, args)
    for token in (0, 1, 17, 29):
        rows = {n: args[n][token : token + 1] for n in ("x", "expert_ids", "expert_scales")}
        assert torch.equal(mixed(ops, args | rows)[0], together[token])


def test_an_expert_that_is_not_there_is_refused() -> None:
    args = drawn_experts(0, F32)
    args["expert_ids"] = args["expert_ids"].clone()
    args["expert_ids"][-1, 0] = args["gate_up"].shape[0]
    with pytest.raises(IndexError, match=f"experts: token {len(args['x']) - 1} chose"):
        mixed(best_cpu_ops(), args)
    with pytest.raises(ShapeError, match="experts: their weights take"):
        mixed(best_cpu_ops(), drawn_experts(0, F32) | {"x": torch.zeros(len(args["x"]), 3)})


# Blocks


@dataclass(frozen=True)
class Drawn:
    """A stack of blocks of every kind, and a batch for it."""

    seed: int
    hidden: int
    kv_heads: int
    group: int
    head_dim: int
    inter: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @classmethod
    def make(cls, seed: int) -> Drawn:
        draw = Draw(seed)
        query_lens = (1,) * draw.integer(0, 3) + tuple(
            draw.integer(2, 30) for _ in range(draw.integer(0, 2))
        )
        query_lens = query_lens or (1,)
        seq_lens = tuple(n + draw.one_of([0, 3, 25]) for n in query_lens)
        sizes = draw.one_of([96, 37]), draw.integer(1, 3), draw.integer(1, 3)
        head_dim, inter = draw.one_of([16, 10]), draw.one_of([128, 51])
        return cls(seed, *sizes, head_dim, inter, query_lens, seq_lens)

    def blocks(self, ops: Ops, dtype: torch.dtype, cast: torch.dtype) -> list[Block]:
        draw, maker = Draw(self.seed + 100), Maker(dtype, seed=self.seed)

        def vector(size: int) -> torch.Tensor:
            drawn: torch.Tensor = maker.normal(size) + 1
            return drawn.to(dtype).to(cast)

        def matrix(*shape: int) -> torch.Tensor:
            drawn: torch.Tensor = maker.normal(*shape) / shape[-1] ** 0.5
            return drawn.to(dtype).to(cast)

        def linear(out: int, into: int) -> LinearWeight:
            bias = vector(out) if self.seed % 2 else None
            return ops.prepare_linear(matrix(out, into), bias)

        def attention() -> AttentionBlock:
            heads, kv_heads, dim = self.kv_heads * self.group, self.kv_heads, self.head_dim
            norms: dict[str, torch.Tensor] = {}
            if kind := draw.integer(0, 2):
                sizes = (dim, dim) if kind == 1 else (heads * dim, kv_heads * dim)
                norms = {"q_norm": vector(sizes[0]), "k_norm": vector(sizes[1])}
            return AttentionBlock(
                norm=draw.one_of([None, vector(self.hidden)]),
                eps=1e-5,
                qkv=linear((heads + 2 * kv_heads) * dim, self.hidden),
                out=linear(self.hidden, heads * dim),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                cos_sin=draw.one_of([None, cos_sin_table(64, dim), cos_sin_table(64, 6)]),
                scale=dim**-0.5,
                window=draw.one_of([None, 1, 9]),
                soft_cap=draw.one_of([None, 2.0]),
                post_norm=draw.one_of([None, vector(self.hidden)]),
                **norms,
            )

        activations: list[Activation] = ["silu", "gelu_tanh"]

        def mlp() -> MlpBlock:
            return MlpBlock(
                norm=draw.one_of([None, vector(self.hidden)]),
                eps=1e-5,
                gate_up=linear(2 * self.inter, self.hidden),
                down=linear(self.hidden, self.inter),
                activation=draw.one_of(activations),
                post_norm=draw.one_of([None, vector(self.hidden)]),
            )

        def moe() -> MoeBlock:
            return MoeBlock(
                norm=vector(self.hidden),
                eps=1e-5,
                router=ops.prepare_linear(matrix(4, self.hidden) * 8),
                experts=ops.prepare_experts(
                    matrix(4, 2 * self.inter, self.hidden), matrix(4, self.hidden, self.inter)
                ),
                top_k=4,  # in low precision another choice would be another function
                renormalizes=self.seed % 2 == 0,
                activation=draw.one_of(activations),
            )

        last = moe if self.seed % 4 == 0 else mlp
        return [attention(), last(), attention(), mlp()]

    def run(self, ops: Ops, dtype: torch.dtype, cast: torch.dtype) -> dict[str, torch.Tensor]:
        maker = Maker(dtype, seed=self.seed)
        per_seq = -(-max(self.seq_lens) // BLOCK_SIZE)
        count = len(self.seq_lens) * per_seq + 1
        table = (maker.permutation(count - 1) + 1).int().view(len(self.seq_lens), per_seq)
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        positions = [torch.arange(seq - query, seq) for query, seq in lens]
        slots = [
            table[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            for row, at in enumerate(positions)
        ]
        shape = (count, BLOCK_SIZE, self.kv_heads, self.head_dim)
        caches = [
            KVCache(maker.normal(*shape).to(cast), maker.normal(*shape).to(cast)) for _ in range(2)
        ]
        residual = (maker.normal(sum(self.query_lens), self.hidden) * 3).to(cast)
        batch = BlockBatch(
            torch.cat(positions),
            torch.cat(slots),
            attention_batch(self.query_lens, self.seq_lens, table, "cpu"),
        )
        ops.run_blocks(ops.prepare_blocks(self.blocks(ops, dtype, cast)), residual, batch, caches)
        kv = {f"KV {i}": torch.stack(cache.paged) for i, cache in enumerate(caches)}
        return {"residual": residual} | kv


@cache
def stacked(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The exact results, and the reference's in the seed's dtype."""
    drawn, dtype = Drawn.make(seed), dtype_of(seed)
    return drawn.run(ReferenceOps(F64), dtype, F64), drawn.run(ReferenceOps(), dtype, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", BLOCK_SEEDS)
def test_blocks(seed: int, backend: str) -> None:
    drawn, dtype = Drawn.make(seed), dtype_of(seed)
    exact, fair = stacked(seed)
    actual = drawn.run(cpu_ops(backend), dtype, dtype)
    for name, value in actual.items():
        assert_within_budget(value, exact[name], fair[name], f"{drawn} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_blocks_cover_every_feature(dtype: torch.dtype) -> None:
    ops, seeds = ReferenceOps(), [seed for seed in BLOCK_SEEDS if dtype_of(seed) == dtype]
    blocks = [block for seed in seeds for block in Drawn.make(seed).blocks(ops, F32, F32)]
    attention = [block for block in blocks if isinstance(block, AttentionBlock)]
    assert {block.window for block in attention} == {None, 1, 9}
    assert {block.soft_cap for block in attention} == {None, 2.0}
    sizes = {block.q_norm is not None and len(block.q_norm) > block.head_dim for block in attention}
    assert sizes == {False, True}
    for name in ("norm", "post_norm", "q_norm", "cos_sin"):
        assert {getattr(block, name) is None for block in attention} == {False, True}
    mlps = [block for block in blocks if isinstance(block, MlpBlock)]
    options = {(block.activation, block.post_norm is None) for block in mlps}
    assert options == set(itertools.product(("silu", "gelu_tanh"), (False, True)))
    assert any(isinstance(block, MoeBlock) for block in blocks)


def test_a_bad_position_of_any_block_is_refused_before_anything_is_written() -> None:
    """The second block's table is the shorter one; a block without rotation takes any position."""
    drawn, ops = replace(Drawn.make(1), query_lens=(1,), seq_lens=(40,)), best_cpu_ops()
    blocks = [block for block in drawn.blocks(ops, F32, F32) if isinstance(block, AttentionBlock)]
    blocks = [replace(blocks[0], cos_sin=None), replace(blocks[1], cos_sin=cos_sin_table(30, 6))]
    shape = (11, BLOCK_SIZE, drawn.kv_heads, drawn.head_dim)
    caches = [KVCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
    table = torch.arange(1, 11, dtype=torch.int32).unsqueeze(0)
    batch = BlockBatch(
        torch.tensor([39]), torch.tensor([40]), attention_batch([1], [40], table, "cpu")
    )
    residual = torch.ones(1, drawn.hidden)
    with pytest.raises(IndexError, match="token 0 has position 39 of 30"):
        ops.run_blocks(ops.prepare_blocks(blocks), residual, batch, caches)
    assert (residual == 1).all() and not any(cache.k.any() or cache.v.any() for cache in caches)
    ops.run_blocks(ops.prepare_blocks(blocks[:1]), residual, batch, caches)
    assert caches[0].k.any()
