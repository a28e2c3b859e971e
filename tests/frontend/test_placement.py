"""Which engine a request goes to: frontend/placement.py by itself."""

from __future__ import annotations

from collections import Counter

from frontend import placement
from frontend.placement import AFFINITY_MARGIN, BLOCK_TOKENS, Candidate, Placement


def engine(
    epoch: int, num_seqs: int = 0, kv_usage: float = 0.0, max_num_seqs: int = 10
) -> Candidate:
    return Candidate(epoch, num_seqs, max_num_seqs, kv_usage)


def prompt(first: int, blocks: int) -> list[int]:
    return [first] * (BLOCK_TOKENS * blocks)


def test_the_cheaper_of_two() -> None:
    place = Placement(seed=0)
    for busy, idle in (
        (engine(1, num_seqs=3), engine(2, num_seqs=2)),
        (engine(1, kv_usage=0.6), engine(2, kv_usage=0.5)),
        (engine(1, num_seqs=3), engine(2, num_seqs=5, max_num_seqs=20)),
        (engine(1, num_seqs=12), engine(2, num_seqs=1, kv_usage=0.9)),
    ):
        for _ in range(5):
            assert place.choose([busy, idle]) == 1
            assert place.choose([idle, busy]) == 0


def test_two_are_drawn_of_many() -> None:
    """The dearest is never taken, the others in the order of their cost."""
    place = Placement(seed=0)
    engines = [engine(i, num_seqs=i) for i in range(5)]
    taken = Counter(place.choose(engines) for _ in range(2000))
    assert 4 not in taken
    assert [index for index, _ in taken.most_common()] == [0, 1, 2, 3]
    assert taken[3] > 100, "the cheapest of all would be everybody's choice"


def test_equal_engines_share_alike() -> None:
    place = Placement(seed=0)
    taken = Counter(place.choose([engine(1), engine(2), engine(3)]) for _ in range(3000))
    assert all(900 < count < 1100 for count in taken.values())


def test_a_prefix_goes_where_it_went() -> None:
    place = Placement(seed=0)
    assert place.choose([engine(1, num_seqs=1), engine(2)], prompt(7, 4)) == 1
    warm = [engine(1), engine(2, num_seqs=3)]
    assert place.choose(warm, prompt(7, 4)) == 1
    assert place.choose(warm, [*prompt(7, 4), *prompt(8, 2)]) == 1
    assert place.choose(warm, [*prompt(7, 1), *prompt(8, 2)]) == 1, "one block is a prefix too"
    assert place.choose(warm, prompt(9, 4)) == 0
    assert place.choose(warm, prompt(7, 4), "salt") == 0
    assert place.choose(warm) == 0
    assert place.choose(warm, prompt(7, 1)[1:]) == 0, "less than a block is none"


def test_the_longest_prefix_decides() -> None:
    place = Placement(seed=0)
    left, right = [engine(1), engine(2, num_seqs=1)], [engine(1, num_seqs=1), engine(2)]
    place.choose(left, prompt(7, 4))
    place.choose([right[1]], prompt(7, 1))
    assert place.choose(left, prompt(7, 2)) == 1
    assert place.choose(right, prompt(7, 5)) == 0


def test_affinity_yields_to_load() -> None:
    place = Placement(seed=0)
    for seqs, usage in ((AFFINITY_MARGIN * 10 + 1, 0.0), (0, AFFINITY_MARGIN + 0.01)):
        place.choose([engine(1)], prompt(7, 4))
        assert place.choose([engine(1, num_seqs=int(seqs) - 1), engine(2)], prompt(7, 4)) == 0
        assert place.choose([engine(1, int(seqs), usage), engine(2)], prompt(7, 4)) == 1
        assert place.choose([engine(1), engine(2)], prompt(7, 4)) == 1, "it has moved for good"


def test_a_restarted_engine_has_no_prefixes() -> None:
    place = Placement(seed=0)
    place.choose([engine(1)], prompt(7, 4))
    assert place.choose([engine(3, num_seqs=1), engine(2)], prompt(7, 4)) == 1


def test_only_the_last_prefixes_are_remembered() -> None:
    place = Placement(seed=0)
    for first in range(placement.MAX_PREFIXES):
        place.choose([engine(1)], prompt(first, 1))
    place.choose([engine(1)], prompt(0, 1))
    place.choose([engine(1)], prompt(-1, 1))
    assert len(place._prefixes) == placement.MAX_PREFIXES
    others = [engine(1, num_seqs=1), engine(2)]
    assert place.choose(others, prompt(0, 1)) == 0
    assert place.choose(others, prompt(1, 1)) == 1
