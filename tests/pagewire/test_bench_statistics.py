"""Figures against numpy's, and what counts as what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.bench.plot import distribution
from pagewire.bench.record import Record
from pagewire.bench.statistics import (
    PERCENTILES,
    Objectives,
    describe,
    output_rate,
    percentile,
    summarize,
    token_gaps,
)

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(
        float(np.percentile(values, q)), rel=1e-9, abs=1e-9
    )


@given(VALUES)
def test_descriptions_are_numpys(values: list[float]) -> None:
    figures = describe(values)
    assert figures is not None
    assert figures["count"] == len(values)
    assert figures["mean"] == pytest.approx(float(np.mean(values)))
    assert figures["max"] == max(values)
    for q in PERCENTILES:
        expected = float(np.percentile(values, q))
        assert figures[f"p{q}"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_no_values_have_no_description() -> None:
    assert describe([]) is None


def answer(
    sent_at: float, times: list[float], tokens: list[int], *, total: int | None = None
) -> Record:
    return Record(
        sent_at=sent_at,
        ended_at=times[-1] + 0.5,
        chunk_times=times,
        chunk_tokens=tokens,
        prompt_tokens=10,
        output_tokens=sum(tokens) if total is None else total,
        cached_tokens=4,
    )


def test_a_record_measures_by_chunk_and_by_token() -> None:
    record = answer(1.0, [3.0, 4.0, 7.0], [2, 1, 3])
    assert record.ttft == 2.0
    assert record.e2e == 6.5
    assert record.tpot == pytest.approx(4 / 5)
    assert record.chunk_gaps() == [1.0, 3.0]
    assert record.token_gaps() == [1.0, 1.0, 1.0, 1.0]


def test_tokens_by_chunk_may_be_unknown() -> None:
    record = answer(0.0, [1.0, 2.0], [], total=8)
    assert record.token_gaps() is None
    assert token_gaps([answer(0.0, [1.0, 2.0], [1, 1]), record]) == []
    assert summarize([record], Objectives())["itl_token_s"] is None


def test_one_token_has_no_tpot_and_meets_a_bound_on_it() -> None:
    record = answer(0.0, [1.0], [1])
    assert record.tpot is None
    assert Objectives(tpot=1e-9).met(record)
    assert not Objectives(ttft=0.5, tpot=1e-9).met(record)


def test_failures_are_told_apart_and_count_in_no_latency() -> None:
    records = [
        answer(0.0, [1.0, 2.0], [1, 2]),
        answer(1.0, [1.5, 9.5], [1, 2]),
        Record(sent_at=0.0, ended_at=1.0, error="RESOURCE_EXHAUSTED", message="full"),
        Record(sent_at=0.0, ended_at=1.0, error="HTTP 429"),
        # It had begun: this is no rejection.
        Record(sent_at=0.0, ended_at=2.0, chunk_times=[1.0], error="UNAVAILABLE"),
        Record(sent_at=0.0, ended_at=2.0, error="INTERNAL", message="later"),
        Record(sent_at=0.0, ended_at=2.0, error="UNFINISHED"),
    ]
    summary = summarize(records, Objectives(ttft=0.6))
    assert (summary["requests"], summary["successful"]) == (7, 2)
    assert summary["rejected"] == {"RESOURCE_EXHAUSTED": 1, "HTTP 429": 1}
    assert summary["errors"] == {"UNAVAILABLE": 1, "INTERNAL": 1}
    assert summary["unfinished"] == 1
    assert summary["first_error"] == "full"
    assert summary["duration_s"] == 10.0
    assert summary["output_tokens"] == 6
    assert summary["output_tokens_per_s"] == pytest.approx(0.6)
    assert summary["total_tokens_per_s"] == pytest.approx(2.6)
    assert summary["tokens_per_chunk"] == pytest.approx(1.5)
    assert summary["cache_hit_rate"] == pytest.approx(0.4)
    assert summary["goodput_per_s"] == pytest.approx(0.1)
    assert summary["ttft_s"]["count"] == 2
    assert summary["itl_chunk_s"]["count"] == 2


def test_nothing_sent_has_no_figures() -> None:
    summary = summarize([], Objectives())
    assert (summary["requests"], summary["output_tokens_per_s"]) == (0, 0.0)
    assert summary["ttft_s"] is summary["goodput_per_s"] is summary["cache_hit_rate"] is None
    assert output_rate([]) == []


def test_the_output_rate_adds_up_to_the_tokens() -> None:
    records = [answer(0.0, [1.0, 2.0, 9.0], [2, 1, 3]), answer(0.5, [3.0, 6.0], [], total=8)]
    rates = output_rate(records, buckets=18)
    width = 9.0 / 18
    assert sum(rate * width for _, rate in rates) == pytest.approx(14)
    assert rates[1][1] == 0.0
    assert rates[2][1] == pytest.approx(2 / width)


def test_a_distribution_ends_at_all_values() -> None:
    assert distribution([0.3, 0.1], 1e3) == [(100.0, 50.0), (300.0, 100.0)]
