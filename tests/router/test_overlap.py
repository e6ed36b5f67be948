"""What replicas hold of a prompt reads like a dictionary, however it was made."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.overlap import OutdatedOverlap, Overlap
from router.prefix_index import PrefixIndex
from tests.support.count_calls import count_calls

NAMES = [f"r{number}" for number in range(40)]
HELD = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 12))


@settings(deadline=None, max_examples=200)
@given(held=HELD, serving=st.sets(st.sampled_from(NAMES)), unit=st.sampled_from([1, 16]))
def test_an_overlap_reads_as_the_dictionary_it_stands_for(
    held: dict[str, int], serving: set[str], unit: int
) -> None:
    index = PrefixIndex(16)
    for name, depth in held.items():
        index.apply(name, range(1, depth + 1), [])
    tokens = {name: depth * unit for name, depth in held.items()}
    for overlap in (Overlap.of(tokens), index.match(range(1, 21), 0.0).times(unit)):
        assert overlap == tokens and len(overlap) == len(tokens)
        assert [overlap.get(name, 0) for name in NAMES] == [tokens.get(name, 0) for name in NAMES]
        assert [name in overlap for name in NAMES] == [name in tokens for name in NAMES]
        assert overlap.most == max(tokens.values(), default=0)
        assert overlap.most_among(serving) == max((tokens[name] for name in serving & tokens.keys()), default=0)
        depths = [depth for depth, _ in overlap.levels]
        assert depths == sorted(set(depths), reverse=True)
        levels = [(mask, set(overlap.names(mask))) for _, mask in overlap.levels]
        assert sum(len(names) for _, names in levels) == len(tokens)
        for mask, names in levels:
            assert names == {name for name in NAMES if overlap.is_in(mask, name)}
            assert len({tokens[name] for name in names}) == 1


@pytest.mark.parametrize("change", ["apply", "replace", "extend", "forget", "expect"])
def test_an_overlap_that_its_index_has_outrun_is_not_read_and_a_copy_is_kept(change: str) -> None:
    """Policies of one's own may keep what they were given, as a dictionary."""
    index = PrefixIndex(16)
    for name, depth in (("a", 2), ("b", 1)):
        index.apply(name, range(1, depth + 1), [])
    before, read = index.match([1, 2, 3], 0.0), index.match([1, 2, 3], 0.0)
    kept = dict(read)
    arguments: dict[str, Any] = {"apply": ([4], []), "replace": ([4],), "extend": ([4],), "expect": ([4], 0.0)}
    getattr(index, change)("a", *arguments.get(change, ()))
    assert kept == {"a": 2, "b": 1}
    with pytest.raises(OutdatedOverlap, match="copy it with dict"):
        dict(before)


def test_the_blocks_of_a_replica_are_found_without_visiting_all_others() -> None:
    """Each of many replicas holds another depth."""

    def calls(num_replicas: int) -> int:
        index, draw = PrefixIndex(16), random.Random(1)
        chain = [draw.getrandbits(64) for _ in range(256)]
        for number in range(num_replicas):
            index.apply(f"r{number}", chain[: 256 * (number + 1) // num_replicas], [])

        def ask() -> None:
            found = index.match(chain, 0.0)
            assert (found.most, found["r0"], found["r7"]) == (256, 256 // num_replicas, 256 * 8 // num_replicas)

        return count_calls(ask)

    assert calls(256) <= 2 * calls(16)


def test_a_prefix_that_every_replica_holds_is_found_as_fast_in_a_large_fleet() -> None:
    def calls(num_replicas: int) -> int:
        index, draw = PrefixIndex(16), random.Random(1)
        chain = [draw.getrandbits(64) for _ in range(256)]
        for number in range(num_replicas):
            index.apply(f"r{number}", chain[:64], [])
        index.apply("r3", chain[64:200], [])

        def ask() -> None:
            found = index.match(chain, 0.0)
            assert (found.most, found.get("r3"), found.get("r5")) == (200, 200, 64)

        return count_calls(ask)

    assert calls(256) == calls(16)
