"""The index of the blocks that each replica holds, compared with a dictionary of sets."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.held_blocks import HeldBlocks
from router.prefix_index import PrefixIndex
from tests.support.examples import examples

EXPECT_S = 10.0


class Model:
    """The blocks that the index ought to know, by brute force.

    Where a replica lacks blocks before some that it holds, it is left open which of these are expected: those
    after the last one held at least, those after the first one that is not at most.
    """

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.least: dict[str, dict[int, float]] = {}  # replica -> block -> when it is no longer expected
        self.most: dict[str, dict[int, float]] = {}

    def apply(self, replica: str, stored: Sequence[int], evicted: Sequence[int]) -> None:
        self.held.setdefault(replica, set()).update(stored)
        self.held[replica].difference_update(evicted)
        self.settle(replica, [*stored, *evicted])

    def replace(self, replica: str, hashes: Sequence[int]) -> None:
        self.held[replica] = set(hashes)
        self.settle(replica, hashes)

    def settle(self, replica: str, blocks: Sequence[int]) -> None:
        for expected in (self.least, self.most):
            for block in blocks:
                expected.get(replica, {}).pop(block, None)

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        held = [block in self.held.setdefault(replica, set()) for block in chain]
        first_unheld = (*held, False).index(False)
        after_held = len(held) - (*reversed(held), True).index(True)
        for expected, start in ((self.least, after_held), (self.most, first_unheld)):
            expected.setdefault(replica, {}).update(dict.fromkeys(chain[start:], now + EXPECT_S))

    def forget(self, replica: str) -> None:
        self.held.pop(replica, None)
        for expected in (self.least, self.most):
            expected.pop(replica, None)

    def num_leading(self, replica: str, chain: Sequence[int], now: float) -> int:
        """Return how many blocks at the beginning of `chain` the replica holds or is expected to hold at least."""
        held, until = self.held[replica], self.least.get(replica, {})
        return next(
            (at for at, block in enumerate(chain) if block not in held and until.get(block, now) <= now),
            len(chain),
        )

    def may_know(self, replica: str, block: int, now: float) -> bool:
        """Whether the replica holds the block, or is expected to hold it at most."""
        return block in self.held[replica] or self.most.get(replica, {}).get(block, now) > now


class ForgetfulModel(Model):
    """What an index may know that forgets: of a dispatched block it may not remember that it is there already."""

    def expect(self, replica: str, chain: Sequence[int], now: float) -> None:
        super().expect(replica, chain, now)
        self.most[replica].update(dict.fromkeys(chain, now + EXPECT_S))


class Driver:
    """Random deltas in and out of order, over few chains that share their beginnings, and over many replicas."""

    def __init__(self, seed: int, num_replicas: int, length: int, max_blocks: int = 4_000_000) -> None:
        self.draw = random.Random(seed)
        self.index, self.model, self.now = PrefixIndex(16, max_blocks, EXPECT_S), Model(), 0.0
        self.replicas = [f"r{number}" for number in range(num_replicas)]
        self.chains = [[self.draw.getrandbits(64) for _ in range(length)]]
        for _ in range(5):
            shared = self.draw.choice(self.chains)[: self.draw.randint(0, length)]
            self.chains.append(shared + [self.draw.getrandbits(64) for _ in range(length - len(shared))])

    def some_blocks(self) -> list[int]:
        """A beginning, a piece or a handful of a chain's blocks, some of them twice."""
        chain = self.draw.choice(self.chains)
        start, stop = sorted(self.draw.randint(0, len(chain)) for _ in range(2))
        handful = self.draw.choices(chain, k=3)
        return self.draw.choice((chain[:stop], chain[start:stop], handful, list(reversed(chain)), []))

    def step(self) -> None:
        self.now += self.draw.choice((0.0, 0.5, 4.0))
        replica = self.draw.choice(self.replicas)
        operation = self.draw.choices(
            ("apply", "replace", "expect", "forget", "rest"), weights=(50, 10, 15, 8, 2)
        )[0]
        for it in (self.index, self.model):
            state = self.draw.getstate()
            if operation == "apply":
                it.apply(replica, self.some_blocks(), self.some_blocks())
            elif operation == "replace":
                it.replace(replica, self.some_blocks())
            elif operation == "expect":
                it.expect(replica, self.some_blocks(), self.now)
            elif operation == "forget":
                it.forget(replica)
            if it is self.index:
                self.draw.setstate(state)

    def check(self, is_whole: bool) -> None:
        for chain in self.chains:
            found = self.index.match(chain, self.now)
            assert found.keys() <= self.model.held.keys() and 0 not in found.values()
            for replica in self.model.held:
                leading, depth = self.model.num_leading(replica, chain, self.now), found.get(replica, 0)
                assert depth == leading if is_whole else depth >= leading
                assert not depth or self.model.may_know(replica, chain[depth - 1], self.now)
        assert self.model.least == self.model.most or not is_whole  # then it is not left open what is expected

    def step_whole(self) -> None:
        """Apply a delta as replicas send it: a whole prefix stored, or a block evicted with all that follow it."""
        self.now += self.draw.choice((0.0, 0.5, 4.0))
        replica, chain = self.draw.choice(self.replicas), self.draw.choice(self.chains)
        start, stop = sorted(self.draw.randint(0, len(chain)) for _ in range(2))
        with_it = [other for other in self.chains if other[: start + 1] == chain[: start + 1]]
        followers = list({block: None for other in with_it for block in other[start:]})
        for it in (self.index, self.model):
            state = self.draw.getstate()
            match self.draw.choice(("store", "evict", "replace", "expect", "forget")):
                case "store":
                    it.apply(replica, chain[:stop], [])
                case "evict":
                    it.apply(replica, [], followers)
                case "replace":
                    it.forget(replica)
                    it.replace(replica, chain[:stop])
                case "expect":
                    it.expect(replica, chain[:stop], self.now)
                case _:
                    it.forget(replica)
            if it is self.index:
                self.draw.setstate(state)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(seed=st.integers(0, 2**32), num_replicas=st.sampled_from((1, 3, 70)), length=st.sampled_from((1, 8, 300)))
def test_a_match_after_any_history_ends_at_a_known_block(seed: int, num_replicas: int, length: int) -> None:
    """Deltas out of order, repeated and lost: a match ends at a known block, and not before the first hole."""
    driver = Driver(seed, num_replicas, length)
    for _ in range(150):
        driver.step()
        driver.check(is_whole=False)
    live = set().union(*driver.model.held.values()) if driver.model.held else set()
    assert len(live) <= driver.index.num_blocks <= 6 * length


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(seed=st.integers(0, 2**32), num_replicas=st.sampled_from((1, 3, 70)), length=st.sampled_from((1, 8, 300)))
def test_prefixes_that_are_whole_are_matched_exactly(seed: int, num_replicas: int, length: int) -> None:
    driver = Driver(seed, num_replicas, length)
    for _ in range(150):
        driver.step_whole()
        driver.check(is_whole=True)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    seed=st.integers(0, 2**32), num_replicas=st.sampled_from((1, 3, 70)), max_blocks=st.sampled_from((1, 50, 500))
)
def test_a_full_index_knows_less_but_nothing_wrong(seed: int, num_replicas: int, max_blocks: int) -> None:
    driver = Driver(seed, num_replicas, length=300, max_blocks=max_blocks)
    driver.model = ForgetfulModel()
    for step in range(150):
        driver.step()
        driver.index.use(driver.some_blocks())
        for chain in driver.chains:
            for replica, depth in driver.index.match(chain, driver.now).items():
                assert driver.model.may_know(replica, chain[depth - 1], driver.now), (step, replica)
    for replica in driver.replicas:
        driver.index.forget(replica)
    for _ in range(200):
        driver.index.apply("last", [], [])
    assert driver.index.num_blocks == 0
    driver.index.apply("last", range(1, max_blocks + 1), [])
    assert driver.index.match(range(1, max_blocks + 1), driver.now) == {"last": max_blocks}
    assert driver.index.num_blocks == max_blocks


def test_a_hole_does_not_hide_the_blocks_behind_it() -> None:
    """A delta was lost: a replica that holds a block holds all before it."""
    index = PrefixIndex(16)
    index.apply("a", [1, 2, 4, 5], [])
    index.apply("b", [5, 4, 3, 2, 1], [])
    assert index.match([1, 2, 3, 4, 5], 0.0) == {"a": 5, "b": 5}
    assert index.match([1, 2, 3], 0.0) == {"a": 2, "b": 3}


def test_a_dispatch_counts_immediately_until_it_expires_or_is_confirmed() -> None:
    index = PrefixIndex(16, expect_s=10.0)
    index.expect("a", [1, 2, 3], now=0.0)
    index.expect("b", [1, 2, 3], now=4.0)
    assert index.match([1, 2, 3, 4], 9.9) == {"a": 3, "b": 3}
    index.apply("a", [1, 2], [])
    assert index.match([1, 2, 3, 4], 10.0) == {"a": 2, "b": 3}
    index.expect("b", [1, 2], now=13.9)
    assert index.match([1, 2, 3, 4], 14.0) == {"a": 2, "b": 2}


def test_a_dispatch_outlives_a_snapshot_that_cannot_know_of_it() -> None:
    index = PrefixIndex(16, expect_s=10.0)
    index.apply("a", [7, 8], [])
    index.expect("a", [1, 2, 3], now=0.0)
    index.replace("a", [1])
    assert index.match([1, 2, 3], 5.0) == {"a": 3}
    assert index.match([7, 8], 5.0) == {}
    assert index.match([1, 2, 3], 10.0) == {"a": 1}


def test_a_full_index_takes_new_blocks_and_forgets_those_of_no_use() -> None:
    index = PrefixIndex(16, max_blocks=100)
    first, second = list(range(1, 81)), list(range(1001, 1081))
    index.apply("a", first, [])
    index.apply("b", second, [])
    assert index.num_dropped == 60 and index.num_blocks == 100
    assert index.match(second, 0.0) == {"b": 80}
    assert index.match(first, 0.0) == {}
    index.apply("b", first, [])
    assert index.match(first, 0.0)["b"] == 80 and index.num_blocks == 100


def test_the_most_recently_used_blocks_stay_when_snapshots_do_not_fit() -> None:
    """Replicas tell first what was used last, all of them a first part before any tells a second."""
    index = PrefixIndex(16, max_blocks=1000)
    parts = {
        (name, part): range(at, at + 300)
        for at, (name, part) in zip(
            range(1000, 10_000, 1000), [(name, part) for part in range(3) for name in "abc"], strict=True
        )
    }
    for (name, part), blocks in parts.items():
        if part:
            index.extend(name, blocks)
        else:
            index.replace(name, blocks)
    for (name, part), blocks in parts.items():
        depth = index.match(blocks, 0.0).get(name, 0)
        assert depth == (300 if part == 0 else 100 if (name, part) == ("a", 1) else 0)
    assert (index.num_blocks, index.num_dropped) == (1000, 1700)
    index.extend("b", parts["a", 0])  # what is known already needs no room
    assert index.match(parts["a", 0], 0.0) == {"a": 300, "b": 300}


def test_a_prompt_whose_beginning_was_forgotten_is_expected_as_a_whole() -> None:
    index = PrefixIndex(16, max_blocks=100)
    prompt = list(range(1, 81))
    index.apply("a", prompt, [])
    index.apply("a", range(1001, 1041), [])
    assert index.match(prompt, 0.0) == {}
    index.expect("a", prompt, 0.0)
    assert index.match(prompt, 0.0) == {"a": 80}


def test_a_hot_prompt_keeps_all_its_blocks_in_any_flood() -> None:
    """Replicas report forty times what the index can hold, and each new prompt has a part that nobody else has."""
    index = PrefixIndex(16, max_blocks=1000, expect_s=10.0)
    hot, draw = list(range(1, 101)), random.Random(7)
    index.apply("a", [draw.getrandbits(64) for _ in range(1000)], [])
    index.apply("a", hot, [])
    for second in range(100):
        now, own = float(second), [draw.getrandbits(64) for _ in range(100)]
        assert index.match(hot + own, now) == ({"a": 100, "b": 100} if second else {"a": 100})
        index.use(hot + own)
        index.expect("b", hot + own, now)
        index.apply("b", hot + own, [])
        flood = [draw.getrandbits(64) for _ in range(400)]
        index.apply("a", flood, [])
        assert index.match(flood, now) == {"a": 400}  # what found no room is never what came last
        assert index.num_blocks <= 1000


def test_blocks_that_were_useful_once_give_way_to_those_useful_now() -> None:
    index = PrefixIndex(16, max_blocks=800)
    prompts = [list(range(start, start + 100)) for start in range(1000, 101_000, 1000)]
    for turn, prompt in enumerate(prompts):
        index.apply("a", prompt, [])
        for used in prompts[max(turn - 3, 0) : turn + 1]:
            index.use(used)
            assert index.match(used, 0.0) == {"a": 100}
    assert index.num_blocks <= 800
    assert not any(index.match(prompt, 0.0) for prompt in prompts[:80])


def test_a_lowered_bound_is_reached_gradually_and_a_raised_one_immediately() -> None:
    index = PrefixIndex(16, max_blocks=1000)
    index.apply("a", range(1, 1001), [])
    index.max_blocks = 100
    for step in range(200):
        index.apply("b", [10_000 + step], [])
    assert index.num_blocks == 100 and index.match([10_199], 0.0) == {"b": 1}
    dropped, index.max_blocks = index.num_dropped, 5000
    index.apply("a", range(1, 3001), [])
    assert index.match(range(1, 3001), 0.0) == {"a": 3000} and index.num_dropped == dropped


def test_only_blocks_with_a_living_holder_take_room() -> None:
    """Replicas are replaced one after the other, as in an upgrade, each with as much as the index has room for."""
    index = PrefixIndex(16, max_blocks=10_000)
    shared = list(range(1, 2001))
    for generation in range(5):
        replica, own = f"r{generation}", range(generation * 100_000 + 10_000, generation * 100_000 + 18_000)
        index.apply("stays", shared, [])
        index.replace(replica, [*shared, *own])
        assert (index.num_blocks, index.num_dropped) == (10_000, 0)
        assert index.match(own, 0.0) == {replica: 8000}
        index.forget(replica)
        assert index.num_blocks == 2000
    index.forget("stays")
    for _ in range(500):  # blocks that lost several holders count until they are swept
        index.apply("new", [], [])
    assert index.num_blocks == 0
    index.apply("new", range(50_000, 60_000), [])
    assert (index.num_blocks, index.num_dropped) == (10_000, 0)


def test_blocks_that_no_replica_holds_any_more_make_room() -> None:
    """Replicas come, are filled and go, a hundred times: neither blocks nor slots pile up."""
    index = PrefixIndex(16, max_blocks=4000)
    for generation in range(100):
        for number in range(5):
            blocks = [(generation << 32) + (number << 16) + block + 1 for block in range(400)]
            index.apply(f"{generation}-{number}", blocks, [])
            index.apply(f"{generation}-{number}", [], blocks[200:])
            assert index.match(blocks, 0.0) == {f"{generation}-{number}": 200}
        for number in range(5):
            index.forget(f"{generation}-{number}")
        assert index.replicas == []
    assert index.num_dropped == 0
    assert index.num_slots <= 20


def test_snapshots_do_not_use_up_slots() -> None:
    index = PrefixIndex(16)
    for start in range(300):
        index.replace("a", range(start, start + 500))
        assert index.match(range(start, start + 600), 0.0) == {"a": 500}
        assert index.match(range(max(start - 1, 0), start + 500), 0.0).get("a", 0) in (0, 500)
    assert index.num_slots <= 4 and index.num_blocks < 2000


def test_expectations_are_bounded() -> None:
    """The oldest of too many are dropped first; blocks that replicas reported stay."""
    index = PrefixIndex(16, expect_s=1e9, max_expected=100)
    index.apply("a", [1, 2], [])
    index.expect("a", [1, 2, 3, 4], now=0.0)
    for number in range(1, 50):
        chain = range(100 * number, 100 * number + 20)
        index.expect("b", chain, now=0.0)
        assert index.match(chain, 0.0) == {"b": 20}
    assert index.match([1, 2, 3, 4], 0.0) == {"a": 2}
    lately = [number for number in range(1, 50) if index.match(range(100 * number, 100 * number + 20), 0.0)]
    assert lately == [45, 46, 47, 48, 49]


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"block_tokens": 0}, {"max_blocks": 0}, {"max_expected": 0}, {"expect_s": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PrefixIndex(**{"block_tokens": 16, **wrong})  # type: ignore[arg-type]


def test_the_dictionaries_of_a_growing_index_grow_in_turn() -> None:
    """One that grows moves all it has, and every stream of an ingress waits. Also of hashes that are too even."""
    held = HeldBlocks(10_000_000)
    slot, shards = held.new_slot(), {id(shard): shard for shard in held._shards}
    sizes, most = dict.fromkeys(shards, 0), 0
    for first in range(0, 1_000_000, 4096):
        held.add(slot, [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(first, first + 4096)])
        after = {name: sys.getsizeof(shard) for name, shard in shards.items()}
        if first > 100_000:
            most = max(most, sum(after[name] != sizes[name] for name in shards))
        sizes = after
    assert len(shards) == 128 and 1 <= most <= 16
