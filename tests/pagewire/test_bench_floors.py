"""bench/floors.py against steps counted one by one; what bench/ceilings.py measures."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from bench.ceilings import Meter
from bench.floors import Ceilings, ModelReads, floors, fraction
from bench.workloads import WORKLOADS, size
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelReads("bfloat16", 106_000_000, 28_000_000, 268_000_000, 17_280, 23_040)
MACHINES = {
    "memory": Ceilings(2, 1, read=1e10, float32=1e12, bfloat16=1e12, int8=None),
    "arithmetic": Ceilings(2, 1, read=1e12, float32=1e11, bfloat16=1e11, int8=None),
    "both": Ceilings(2, 1, read=3e10, float32=2e11, bfloat16=2e11, int8=None),
}


def step_seconds(machine: Ceilings, new: list[tuple[int, int]], shared: int) -> float:
    """new: of each sequence, its tokens before the step and those of it."""
    num_bytes = MODEL.weight_bytes + MODEL.kv_bytes * (
        shared + sum(before - shared + count for before, count in new)
    )
    pairs = sum(before + i + 1 for before, count in new for i in range(count))
    operations = 2 * MODEL.layer_params * sum(count for _, count in new)
    operations += 2 * MODEL.head_params * len(new) + 4 * MODEL.query_width * pairs
    return max(num_bytes / machine.read, operations / machine.bfloat16)


def serve(machine: Ceilings, workload: str, rng: random.Random) -> tuple[float, float]:
    """Output and prompt tokens a second of a server that computes each prompt at once, in
    the step after a stream becomes free."""
    load = size(workload)
    flags = dict(flag.split("=") for flag in WORKLOADS[workload])

    def draw(name: str) -> int:
        low, _, high = flags[name].partition(":")
        return rng.randint(int(low), int(high or low))

    waiting = [
        (load.shared + draw("--input-len"), draw("--output-len")) for _ in range(load.num_requests)
    ]
    prompts, outputs = (sum(column) for column in zip(*waiting, strict=True))
    seconds = step_seconds(machine, [(0, load.shared)], 0) if load.shared else 0.0
    running: list[tuple[int, int]] = []
    while waiting or running:
        new = [(context - 1, 1) for context, _ in running]
        began = [waiting.pop() for _ in range(min(len(waiting), load.concurrency - len(running)))]
        new += [(load.shared, prompt - load.shared) for prompt, _ in began]
        seconds += step_seconds(machine, new, load.shared)
        after = [(context + 1, left - 1) for context, left in [*running, *began]]
        running = [sequence for sequence in after if sequence[1]]
    return outputs / seconds, prompts / seconds


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_server_is_faster(workload: str, machine: str) -> None:
    found = floors(MODEL, MACHINES[machine], workload)
    output, prompt = serve(MACHINES[machine], workload, random.Random(0))
    # Lengths are drawn, so a run has a little more or less to do than the mean.
    assert 0.5 < output / found["output tok/s"] < 1.06
    assert 0.5 < prompt / found["prompt tok/s"] < 1.06


def test_fewer_requests_share_less() -> None:
    # D's 512 shared tokens are computed once, for 64 requests or for 16.
    machine = MACHINES["arithmetic"]
    whole, quarter = floors(MODEL, machine, "D"), floors(MODEL, machine, "D", 0.25)
    more = 64 / quarter["output tok/s"] - 64 / whole["output tok/s"]  # seconds of a request
    # Nothing is sampled from them.
    shared = step_seconds(machine, [(0, 512)], 0) - 2 * MODEL.head_params / machine.bfloat16
    assert more == pytest.approx(shared / 16 - shared / 64)
    assert floors(MODEL, machine, "B", 0.5) == pytest.approx(floors(MODEL, machine, "B"))


def test_a_lone_stream_can_reach_it() -> None:
    for machine in MACHINES.values():
        found = floors(MODEL, machine, "A")
        output, _ = serve(machine, "A", random.Random(0))
        assert output == pytest.approx(found["output tok/s"], rel=0.02)
        decode = step_seconds(machine, [(128 + 63, 1)], 0)
        assert found["ITL p50 ms"] == pytest.approx(1e3 * decode)
        prompt = step_seconds(machine, [(0, 128)], 0)
        assert found["TTFT p50 ms"] == pytest.approx(1e3 * prompt, rel=0.01)


def test_prompts_alone_have_no_time_between_tokens() -> None:
    assert "ITL p50 ms" not in floors(MODEL, MACHINES["both"], "E")


def test_a_fraction_is_below_one_for_what_is_slower() -> None:
    assert fraction("output tok/s", 80.0, 100.0) == 0.8
    assert fraction("ITL p50 ms", 100.0, 80.0) == 0.8


def test_what_a_model_reads(tmp_path: Path) -> None:
    model = str(write_hf(tmp_path, TinySpec()))
    # Two layers of q and o, k and v, gate, up and down; then the head.
    layers = 2 * (2 * 36 * 36 + 2 * 36 * 12 + 3 * 36 * 50)
    head = 300 * 36
    assert ModelReads.of(model, "float32") == ModelReads(
        *("float32", layers, head, 4 * (layers + head), 2 * 36, 4 * 2 * 2 * 12)
    )
    half = ModelReads.of(model, "bfloat16")
    assert (half.weight_bytes, half.kv_bytes) == (2 * (layers + head), 2 * 2 * 2 * 12)
    assert ModelReads.of(model, "packed").weight_bytes == 4 * (layers + head)
    with pytest.raises(SystemExit, match="int3"):
        ModelReads.of(model, "int3")


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Meter:
    return Meter.build(tmp_path_factory.mktemp("meter"))


def test_the_machine_is_measured(meter: Meter) -> None:
    found = meter.measure(threads=2, num_bytes=1 << 20, tries=1)
    assert (found.threads, found.num_bytes) == (2, 1 << 20)
    assert min(found.read, found.float32, found.bfloat16) > 1e6


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_bytes", [1_000, 5_000_000, 15_900_000, 17_000_000, 40_000_000])
def test_all_bytes_are_read(meter: Meter, num_bytes: int, threads: int) -> None:
    read = meter.measure(threads, num_bytes, tries=1).num_bytes
    # But less than a vector of each thread and each of its parts, of at most 8 MiB.
    assert num_bytes - 64 * 6 * threads < read <= num_bytes


def test_products_of_bytes_keep_their_sums_in_registers(meter: Meter) -> None:
    # Their instructions do at least twice as much as those of bfloat16; sums in memory halve it.
    found = meter.measure(threads=1, num_bytes=1 << 20, tries=50)
    if found.int8 is None:
        pytest.skip("this CPU has no products of bytes")
    assert found.int8 > 1.5 * found.bfloat16
