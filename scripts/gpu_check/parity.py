"""Is it right? Sections whose failures fail the whole check."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import torch

from pagewire.types import SamplingParams
from scripts.gpu_check.engine import Engine
from scripts.gpu_check.models import LLAMA, QWEN, checkpoint, prompts, reference
from scripts.gpu_check.outcome import Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.gpu_check.engine import Answer
    from scripts.gpu_check.measure import Bench

SHAPES = (LLAMA, QWEN)
_FACTOR = 4.0
"""As in kernels/tolerances.py: room for another order of summation."""
_PROMPT_LENGTHS = (1, 7, 40, 129, 300)
_OUTPUT = 24
_MOST_WORKERS = 8
_PASSED = "tests passed"
_ALONE = "test_the_estimated_memory_holds_what_is_taken"


def kernels(bench: Bench, work: Path) -> Outcome:
    """tests/gpu, every kernel against float64. On a CPU a few of the CPU kernels' tests."""
    if not bench.is_cuda:
        return _pytest(work, "tests/kernels/test_parity.py", "-k", "silu_mul and torch")
    if importlib.util.find_spec("xdist") is None:
        return _pytest(work, "tests/gpu")
    # Most of the time goes into compiling, each kernel on one core. What looks at the whole
    # device's memory has the device to itself.
    workers = min(_MOST_WORKERS, os.cpu_count() or 1)
    together = _pytest(work, "tests/gpu", f"-n{workers}", "-k", f"not {_ALONE}")
    alone = _pytest(work, "tests/gpu/test_graphs_gpu.py", "-k", _ALONE)
    passed = sum(outcome.value(_PASSED) or 0.0 for outcome in (together, alone))
    outcome = Outcome(failures=together.failures + alone.failures)
    outcome.add(_PASSED, passed, "tests")
    return outcome


def _pytest(work: Path, *arguments: str) -> Outcome:
    report = work / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run([*command, f"--junitxml={report}", *arguments], check=False)
    if not report.exists():
        return Outcome(failures=[f"pytest wrote no report, exit status {finished.returncode}"])
    outcome = read_junit(report)
    if finished.returncode and not outcome.failures:
        outcome.failures.append(f"pytest ended with exit status {finished.returncode}")
    return outcome


def read_junit(report: Path) -> Outcome:
    """Of a run in which every test is meant to run: no test at all, or a skipped one, is a
    failure."""
    outcome = Outcome()
    passed = 0
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            passed += 1
            continue
        reason = (bad.get("message") or "").splitlines()[:1]
        outcome.failures.append(f"{case.get('name')} {bad.tag}: {''.join(reason)[:300]}")
    if not passed and not outcome.failures:
        outcome.failures.append("no test was run")
    outcome.add(_PASSED, passed, "tests")
    return outcome


def models(bench: Bench, work: Path) -> Outcome:
    """Greedy outputs and their logprobs against transformers on the same weights."""
    outcome = Outcome()
    for shape in SHAPES:
        directory = checkpoint(shape, work, bench)
        vocab_size = 300 if bench.tiny else shape.fields["vocab_size"]
        asked = [prompts(1, n, vocab_size, seed=n)[0] for n in _PROMPT_LENGTHS]
        for dtype in (torch.float32, torch.bfloat16):
            answers = _generate(directory, bench, dtype, asked)
            _compare(
                outcome, f"{shape.name} {_name(dtype)}", directory, bench, dtype, asked, answers
            )
    return outcome


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _generate(
    directory: Path, bench: Bench, dtype: torch.dtype, asked: list[list[int]]
) -> list[Answer]:
    engine = Engine(
        directory,
        bench,
        dtype=_name(dtype),
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        kv_cache_memory="64MiB" if bench.tiny else "2GiB",
    )
    sampling = SamplingParams(_OUTPUT, temperature=0.0, ignore_eos=True, logprobs=0)
    answers = [engine.add(prompt, sampling) for prompt in asked]
    engine.run()
    return answers


def _compare(
    outcome: Outcome,
    label: str,
    directory: Path,
    bench: Bench,
    dtype: torch.dtype,
    asked: list[list[int]],
    answers: list[Answer],
) -> None:
    """What transformers loses to rounding in the same dtype, against its own float64, is the
    yardstick; ours may be _FACTOR times as far off."""
    sequences = [prompt + answer.ids for prompt, answer in zip(asked, answers, strict=True)]
    exact = _logprobs(reference(directory, bench, torch.float64), asked, sequences, bench)
    rounded = _logprobs(reference(directory, bench, dtype), asked, sequences, bench)
    yardstick = worst = shortfall = 0.0
    is_likeliest = 0
    for rows, rounded_rows, answer in zip(exact, rounded, answers, strict=True):
        ids = torch.tensor(answer.ids, device=rows.device)
        drawn = rows.gather(1, ids[:, None])[:, 0]
        ours = torch.tensor([p.logprob for p in answer.logprobs], device=rows.device)
        assert len(ours) == len(ids) == _OUTPUT, (len(ours), len(ids))
        worst = max(worst, float((ours.double() - drawn).abs().max()))
        likeliest = rows.argmax(dim=1)
        # Of the tokens in question: those nobody draws are rounded worse.
        asked_for = torch.stack([ids, likeliest], dim=1)
        lost = (rows - rounded_rows).gather(1, asked_for).abs()
        yardstick = max(yardstick, float(lost.max()))
        shortfall = max(shortfall, float((rows.max(dim=1).values - drawn).max()))
        is_likeliest += int((likeliest == ids).sum())
    budget = _FACTOR * yardstick + torch.finfo(torch.float32).eps
    if not worst <= budget:
        outcome.failures.append(
            f"{label}: a logprob is {worst:.3g} off transformers' float64, allowed {budget:.3g}"
        )
    # Two tokens closer than twice the error may change places.
    if not shortfall <= 2 * budget:
        outcome.failures.append(
            f"{label}: a greedy token is {shortfall:.3g} less likely than the likeliest, "
            f"allowed {2 * budget:.3g}"
        )
    total = len(asked) * _OUTPUT
    outcome.add(f"{label}: error over what is allowed", worst, "nat", ratio=worst / budget)
    outcome.add(f"{label}: tokens that are transformers'", is_likeliest, f"of {total}")


@torch.inference_mode()
def _logprobs(
    model: Any, asked: list[list[int]], sequences: list[list[int]], bench: Bench
) -> list[torch.Tensor]:
    """[_OUTPUT, V] float64 for each sequence, of the positions that drew its outputs."""
    rows = []
    for prompt, sequence in zip(asked, sequences, strict=True):
        ids = torch.tensor([sequence], device=bench.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        rows.append(logits.double().log_softmax(dim=1))
    return rows
