"""Workloads are the same for the same seed, and as they were ordered."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pagewire.bench.workload import (
    Ask,
    Lengths,
    from_file,
    other_prompts,
    random_ids,
    random_text,
    shared_prefix,
)
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, OUTPUT = Lengths(3, 9), Lengths(1, 4)


def test_lengths_are_one_number_or_a_range() -> None:
    assert Lengths.parse("7") == Lengths(7, 7)
    assert Lengths.parse("3:9") == PROMPT
    assert (str(Lengths(7, 7)), str(PROMPT)) == ("7", "3:9")


@pytest.mark.parametrize("text", ["", "0", "0:3", "9:3", "3:", "-1", "1:2:3", "x"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        Lengths.parse(text)


def test_random_ids_keep_to_lengths_and_vocabulary() -> None:
    asks = random_ids(200, PROMPT, OUTPUT, 150, random.Random(1))
    assert {len(ask.ids) for ask in asks} == set(range(3, 10))
    assert {ask.max_tokens for ask in asks} == {1, 2, 3, 4}
    assert all(75 <= token_id < 150 for ask in asks for token_id in ask.ids)
    assert len({ask.ids for ask in asks}) == 200
    assert asks == random_ids(200, PROMPT, OUTPUT, 150, random.Random(1))
    assert asks != random_ids(200, PROMPT, OUTPUT, 150, random.Random(2))


def test_random_text_counts_words() -> None:
    asks = random_text(50, PROMPT, OUTPUT, random.Random(1))
    assert {len(ask.text.split()) for ask in asks if ask.text is not None} == set(range(3, 10))
    assert asks == random_text(50, PROMPT, OUTPUT, random.Random(1))


def test_other_prompts_keep_all_but_the_tokens() -> None:
    asks = shared_prefix(6, 20, 2, PROMPT, OUTPUT, 1000, random.Random(1))
    others = [other_prompts(ask, 3, 1000) for ask in asks]
    for ask, other in zip(asks, others, strict=True):
        assert (len(ask.ids), ask.max_tokens) == (len(other.ids), other.max_tokens)
        assert all(a != b for a, b in zip(ask.ids, other.ids, strict=True))
        assert all(100 <= token_id < 1000 for token_id in other.ids)
    assert others[0].ids[:20] == others[2].ids[:20] != others[1].ids[:20]
    assert len({ask.ids for ask in (*asks, *others)}) == 12


def test_other_text_keeps_all_but_the_words() -> None:
    for ask in random_text(50, PROMPT, OUTPUT, random.Random(1)):
        other = other_prompts(ask, 98, 0)
        assert ask.text is not None
        assert other.text is not None
        assert ask.max_tokens == other.max_tokens
        pairs = list(zip(ask.text.split(), other.text.split(), strict=True))
        assert all(a != b for a, b in pairs)


def test_shared_prefixes_take_turns() -> None:
    asks = shared_prefix(6, 20, 2, PROMPT, OUTPUT, 1000, random.Random(1))
    prefixes = [ask.ids[:20] for ask in asks]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3] == prefixes[5]
    assert all(3 <= len(ask.ids) - 20 <= 9 for ask in asks)


def test_a_file_is_read_in_its_order_and_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt": [5, 6]}\n')
    assert from_file(path, 3, OUTPUT) == [
        Ask(2, text="a"),
        Ask(4, ids=(5, 6)),
        Ask(2, text="a"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: must be an object"),
        ('{"prompt": ""}', "line 2: prompt"),
        ('{"prompt": [1, "a"]}', "line 2: prompt"),
        ('{"prompt": [true]}', "line 2: prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "line 2: max_tokens"),
    ],
)
def test_bad_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ConfigError, match=message):
        from_file(path, 1, OUTPUT)


def test_files_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        from_file(tmp_path / "absent", 1, OUTPUT)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        from_file(tmp_path / "empty", 1, OUTPUT)
