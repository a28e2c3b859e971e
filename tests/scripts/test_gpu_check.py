"""The check for GPU machines, in sizes that a CPU can run: everything but the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.gpu_check import attention, parity, report, rivals, runs, wheels
from scripts.gpu_check.measure import Bench
from scripts.gpu_check.outcome import BATCHING, COMPILED, ENGINE, Line, Outcome
from scripts.gpu_check.runs import Run, run_section
from scripts.gpu_check.sections import BY_NAME

ROOT = Path(__file__).parents[2]
TINY = Bench("cpu", tiny=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu_check")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sections_end_in_one_table_and_one_file(work: Path) -> None:
    out = work / "out"
    sections = ("kernels", "engine")
    ran = run_script(
        "--device=cpu",
        "--tiny",
        f"--work={work}",
        f"--out={out}",
        f"--sections={','.join(sections)}",
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "decode step, floor over time, batch 1, context 40" in ran.stdout
    written = json.loads((out / "gpu_check.json").read_text())
    assert tuple(written["sections"]) == sections
    assert written["versions"]["torch"]
    lines = {
        line["what"]: line
        for section in written["sections"].values()
        for line in section["outcome"]["lines"]
    }
    assert lines["tests passed"]["value"] == 15
    assert lines[ENGINE]["value"] > 0
    gap = lines["host gap of a step, batch 1, context 40"]
    assert gap["at_most"]
    assert gap["ratio"] < 1


@pytest.mark.slow
def test_models_match_transformers(work: Path) -> None:
    outcome = parity.models(TINY, work)
    assert not outcome.failures
    assert len(outcome.lines) == 8
    assert outcome.value("Llama-3.2-1B float32: tokens that are transformers'") == 120


def test_a_wrong_logprob_is_a_failure(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = parity._generate

    def shifted(*arguments: object) -> object:
        answers = generate(*arguments)  # type: ignore[arg-type]
        answers[2].ids[5] = (answers[2].ids[5] + 1) % 300
        return answers

    monkeypatch.setattr(parity, "_generate", shifted)
    monkeypatch.setattr(parity, "SHAPES", (parity.LLAMA,))
    failures = parity.models(TINY, work).failures
    assert any("logprob" in failure for failure in failures)
    assert any("greedy token" in failure for failure in failures)


def test_decode_attention_is_told_as_a_share_of_a_copy(work: Path) -> None:
    copied, attended = attention.decode(TINY, work).lines
    assert attended.ratio == pytest.approx(attended.value / copied.value)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_prefill_attention_computes_what_torch_does(work: Path) -> None:
    outcome = attention.prefill(TINY, work)
    assert not outcome.failures
    assert not outcome.notes
    assert [line.ratio is not None for line in outcome.lines] == [False, True, True]


def test_transformers_answers_the_same_requests(work: Path) -> None:
    batched, compiled = rivals.batching(TINY, work), rivals.compiled(TINY, work)
    assert batched.value(BATCHING)
    assert compiled.value(COMPILED)


def test_a_section_is_stopped_in_time_and_told(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = run_section(BY_NAME["engine"], ["cpu", str(work)], work, os.environ, remaining_s=4.9)
    assert late.reason == "no time was left for it"
    # Nothing has even imported torch by then.
    monkeypatch.setattr(runs, "_LEAST_S", 0.0)
    stopped = run_section(BY_NAME["engine"], ["cpu", str(work)], work, os.environ, 0.01)
    assert stopped.outcome is None
    assert stopped.reason.startswith("stopped after 0 s")


def test_a_section_that_fails_tells_its_last_words(work: Path) -> None:
    failed = run_section(BY_NAME["engine"], ["tpu", str(work)], work, os.environ, 60.0)
    assert failed.outcome is None
    assert failed.reason.startswith("exit status 2")
    assert "invalid choice: 'tpu'" in failed.reason


def test_unknown_sections_and_endless_runs_are_refused() -> None:
    assert "no section 'speed'; known: kernels," in run_script("--sections=speed").stderr
    assert "--device cpu needs --tiny" in run_script("--device=cpu").stderr


def run(*, failures: list[str] | None = None, lines: list[Line] | None = None) -> Run:
    return Run(Outcome(lines or [], failures or []), "", 1.0)


STOPPED = Run(None, "stopped after 60 s", 60.0)


def test_exit_status() -> None:
    missed = run(lines=[Line("x", 1.0, "ms", ratio=0.1, goal=0.8)])
    assert report.exit_status({"kernels": run(), "engine": missed}) == 0
    assert report.exit_status({"kernels": run(failures=["silu is wrong"])}) == 1
    assert report.exit_status({"prefill_attention": run(failures=["3 apart"])}) == 1
    assert report.exit_status({"models": STOPPED}) == 1
    assert report.exit_status({"engine": STOPPED, "kernels": run()}) == 2
    assert report.exit_status({"transformers_compiled": STOPPED, "kernels": run()}) == 0


def test_the_table_has_verdicts_and_what_went_wrong() -> None:
    found = {
        "kernels": run(failures=["silu is wrong"]),
        "engine": run(
            lines=[
                Line(ENGINE, 900.0, "tokens/s"),
                Line("host gap", 0.1, "ms", ratio=0.02, goal=0.05, at_most=True),
                Line("step", 1.0, "ms", ratio=0.7, goal=0.8),
            ]
        ),
        "transformers_batching": run(lines=[Line(BATCHING, 300.0, "tokens/s")]),
        "transformers_compiled": STOPPED,
    }
    text = report.table(found, 90.0)
    assert "WRONG kernels: silu is wrong" in text
    assert "NOT FINISHED transformers_compiled: stopped after 60 s" in text
    rows = {line.split("  ")[-1].strip(): line for line in text.splitlines()}
    assert "host gap" in rows["met"]
    assert "step" in rows["missed"]
    assert [line.ratio for line in report.compare_throughput(found)] == [3.0]


def test_a_report_without_passed_tests_is_a_failure(tmp_path: Path) -> None:
    xml = tmp_path / "report.xml"
    xml.write_text("<testsuites><testsuite/></testsuites>")
    assert parity.read_junit(xml).failures == ["no test was run"]
    xml.write_text(
        "<testsuite><testcase name='a'/><testcase name='b'><failure message='off\nby'/></testcase>"
        "<testcase name='c'><skipped message='NO CUDA DEVICE'/></testcase></testsuite>"
    )
    outcome = parity.read_junit(xml)
    assert outcome.failures == ["b failure: off by", "c skipped: NO CUDA DEVICE"]
    assert outcome.value("tests passed") == 1


def write_wheel(directory: Path, name: str, version: str, *requires: str) -> Path:
    path = directory / f"{name}-{version}-py3-none-any.whl"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {text}" for text in requires]
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_are_taken_for_what_is_not_installed(tmp_path: Path) -> None:
    inner = write_wheel(tmp_path, "pw_inner", "1.5")
    outer = write_wheel(
        tmp_path, "pw_outer", "2.0", "pw-inner>=1", "numpy", "pw-none; python_version < '3.0'"
    )
    write_wheel(tmp_path, "pytest", "99.0")
    wanted = [Requirement("pw-outer>=2"), Requirement("pytest>=8")]
    needed = wheels.resolve(wanted, tmp_path)
    assert needed == sorted([inner, outer])
    wheels.install(needed, tmp_path / "site")
    assert (tmp_path / "site" / "pw_inner.py").exists()


def test_missing_wheels_are_named(tmp_path: Path) -> None:
    write_wheel(tmp_path, "pw_outer", "2.0", "pw-inner<1")
    write_wheel(tmp_path, "pw_inner", "1.5")
    with pytest.raises(wheels.Missing, match=r"pw_outer-2\.0.*wants pw-inner<1.*1\.5 is packed"):
        wheels.resolve([Requirement("pw-outer")], tmp_path)
    with pytest.raises(wheels.Missing, match=r"pytest>=99: .* is installed, it is not packed"):
        wheels.resolve([Requirement("pytest>=99")], None)


def test_what_is_required_is_in_the_project_and_here() -> None:
    wanted = wheels.requirements(ROOT / "pyproject.toml")
    assert len(wanted) == len(wheels.REQUIRED)
    assert wheels.resolve(wanted, None) == []
