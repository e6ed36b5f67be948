"""Requests are placed by cached prefixes and load, and each decision can be explained."""

from __future__ import annotations

import random
import threading
from typing import get_args

import pytest
from msgspec import structs

from cache import KVCacheManager, SharedPrefixes
from cache.node import Namespace
from cache.prefix_hash import block_hashes, prefix_root
from monitoring.metric_table import BY_NAME
from router.addresses import ReplicaAddress
from router.fleet import Fleet
from router.member import ReplicaLoad
from router.placer import Placer, PlacerSettings
from router.policies import POLICIES, Reason
from tests.router.support.fleets import Prompt
from tests.support.count_calls import count_calls

BLOCK = 4
IDLE = ReplicaLoad(pages_free=1000, pages_total=1000, prefill_rate=1000.0)


def made(*names: str, policy: str = "cost") -> tuple[Fleet, Placer]:
    fleet = Fleet()
    fleet.update({name: ReplicaAddress(name, f"tcp://{name}", "secret") for name in names})
    for name in names:
        fleet.record_load(name, IDLE)
    return fleet, Placer(fleet, PlacerSettings(policy=policy, block_tokens=BLOCK), random.Random(1))


def held(prompt: Prompt) -> list[int]:
    root = prefix_root(Namespace(prompt.model, salt=prompt.salt))
    return block_hashes(prompt.prompt_ids, root, BLOCK)


def test_a_prompt_goes_to_the_replica_that_says_it_holds_it() -> None:
    _, placer = made("a", "b", "c", "d")
    prompt = Prompt("r", list(range(400)))
    placer.apply_delta("c", held(prompt), [])
    assert placer.place(prompt, "abcd").order[0] == "c"
    record = placer.decision("r")
    assert record is not None
    assert (record.replica, record.predicted_cached, record.reason) == ("c", 400, "holder")
    assert record.terms["c"].prefill < record.terms[record.runner_up or ""].prefill


def test_an_evicted_prefix_no_longer_attracts() -> None:
    _, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("b", held(prompt))
    placer.apply_delta("b", [], held(prompt)[50:])
    placer.place(prompt, "ab")
    record = placer.decision("r")
    assert record is not None and record.predicted_cached == 200


def test_prompts_with_another_salt_or_model_share_nothing() -> None:
    _, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("b", held(prompt))
    for stranger in (
        Prompt("s", prompt.prompt_ids, salt="tenant"),
        Prompt("t", prompt.prompt_ids, model="other"),
    ):
        placer.place(stranger, "ab")
        record = placer.decision(stranger.request_id)
        assert record is not None and record.predicted_cached == 0


def test_a_prompt_whose_logits_are_wanted_counts_on_no_cache() -> None:
    """The request goes to the least busy replica, and counts there with all its tokens."""
    fleet, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("b", held(prompt))
    fleet.record_load("b", structs.replace(IDLE, queued_prefill_tokens=100))
    scored = Prompt("s", prompt.prompt_ids, most_reusable=0)
    assert placer.uncached_tokens(scored) == 400 and placer.uncached_tokens(prompt) == 1
    fleet.open("s")
    assert placer.place(scored, "ab").order[0] == "a"
    assert fleet.candidates(["a"])[0].queued_prefill_tokens == 400
    placer.overrule("s", "b")
    assert fleet.candidates(["b"])[0].queued_prefill_tokens == 500
    partly = Prompt("t", prompt.prompt_ids, most_reusable=200)
    assert placer.uncached_tokens(partly) == 200


def test_a_resumed_stream_is_looked_up_with_all_its_tokens() -> None:
    _, placer = made("a", "b")
    whole = Prompt("w", list(range(400)))
    placer.replace("b", held(whole))
    placer.place(Prompt("r", list(range(200)), list(range(200, 400))), "ab")
    record = placer.decision("r")
    assert record is not None and (record.predicted_cached, record.num_tokens) == (400, 400)


def test_a_dispatch_counts_immediately_as_load_and_as_prefix() -> None:
    fleet, placer = made("a", "b", "c")
    first = Prompt("r0", list(range(4000)))
    fleet.open("r0")
    home = placer.place(first, "abc").order[0]
    (state,) = fleet.candidates([home])
    assert (state.queued_prefill_tokens, state.num_running) == (4000, 1)
    assert (fleet.placement("r0"), fleet.dispatch_number("r0")) == (home, 1)
    again = Prompt("r1", list(range(4000)))
    fleet.open("r1")
    assert placer.place(again, "abc").order[0] == home  # its sibling is being computed there
    fleet.record_load(home, ReplicaLoad(num_requests=2, num_own=2, queued_prefill_tokens=4001, dispatches_seen=2))
    assert fleet.candidates([home])[0].queued_prefill_tokens == 4001  # the heartbeat counts them now
    for name in ("r0", "r1"):
        placer.release(name)
    assert fleet.loads()[home] == 0


def test_the_next_turn_of_a_short_conversation_finds_the_last_one_before_the_replica_reports_it() -> None:
    fleet, placer = made(*"abcdefgh")
    for number in range(20):
        first = Prompt(f"{number}-1", [number * 100, 1, 2])  # shorter than a block
        fleet.open(first.request_id)
        home = placer.place(first, "abcdefgh").order[0]
        placer.release(first.request_id, [3, 4, 5, 6, 7, 8])
        second = Prompt(f"{number}-2", [number * 100, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        assert placer.place(second, "abcdefgh").order[0] == home
        record = placer.decision(second.request_id)
        assert record is not None and record.predicted_cached == 8


def test_a_burst_spreads_although_no_heartbeat_has_come() -> None:
    fleet, placer = made(*"abcdefgh")
    for number in range(32):
        fleet.open(f"r{number}")
        placer.place(Prompt(f"r{number}", [number * 1000 + n for n in range(100)]), "abcdefgh")
    assert max(fleet.loads().values()) <= 8 and min(fleet.loads().values()) >= 1


def test_lost_draining_full_avoided_and_broken_replicas_come_last() -> None:
    fleet, placer = made(*"abcdef")
    prompt = Prompt("r", list(range(400)))
    for name in "abcde":
        placer.replace(name, held(prompt))
    fleet.mark_lost("a")
    fleet.record_load("b", ReplicaLoad(is_draining=True))
    fleet.record_load("c", ReplicaLoad(is_full=True))
    for _ in range(3):
        fleet.record_call("d", is_failure=True)
    assert placer.place(prompt, "abcdef", avoid=("e",)).order[0] == "f"
    fleet.record_call("d", is_failure=False)


def test_a_circuit_closes_again_after_a_while() -> None:
    now = [0.0]
    fleet = Fleet(lambda: now[0])
    fleet.update({"a": None})
    for _ in range(3):
        assert fleet.candidates("a")[0].is_available
        fleet.record_call("a", is_failure=True)
    assert not fleet.candidates("a")[0].is_available
    now[0] = 5.0
    assert fleet.candidates("a")[0].is_available
    fleet.record_call("a", is_failure=True)  # on probation: one more is enough
    assert not fleet.candidates("a")[0].is_available


def test_a_replica_that_is_gone_is_forgotten() -> None:
    fleet, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("a", held(prompt))
    fleet.update({"b": None})
    assert placer.uncached_tokens(prompt) == 400
    placer.apply_delta("a", held(prompt), [])  # late news
    fleet.update({"a": None, "b": None})
    assert placer.uncached_tokens(prompt) == 400


def test_the_record_has_the_outcome() -> None:
    _, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("b", held(prompt))
    placer.place(prompt, "ab")
    placer.settle("r", 384)
    placer.settle("r", 0)  # of the same attempt: only its first token tells
    record = placer.decision("r")
    assert record is not None and record.actual_cached == 384
    assert {k: placer.totals()[k] for k in ("predicted", "actual", "regret")} == {
        "predicted": 400,
        "actual": 384,
        "regret": 0,
    }


def test_an_index_has_room_for_all_that_the_replicas_can_hold_or_for_the_configured_number() -> None:
    fleet, placer = made("a", "b")
    placer.apply_delta("a", [1], [])
    assert placer.totals()["max_blocks"] == 4_000_000  # at least
    fleet.record_load("b", structs.replace(IDLE, pages_total=10**6, page_size=16 * BLOCK))
    placer.replace("b", [2])
    assert placer.totals()["max_blocks"] == 16_000_000  # at most
    fleet.record_load("b", structs.replace(IDLE, pages_total=4 * 10**5, page_size=16 * BLOCK))
    placer.apply_delta("a", [3], [])
    assert placer.totals()["max_blocks"] == 16 * 4 * 10**5 + 1000 * IDLE.page_size // BLOCK
    fleet.update({"a": None})
    placer.apply_delta("a", [4], [])
    assert placer.totals()["max_blocks"] == 4_000_000
    small = Placer(fleet, PlacerSettings(block_tokens=BLOCK, max_blocks=10))
    small.replace("a", range(1, 31))
    assert {k: small.totals()[k] for k in ("blocks", "max_blocks", "dropped")} == {
        "blocks": 10,
        "max_blocks": 10,
        "dropped": 20,
    }
    small.extend("a", range(31, 41))
    assert (small.totals()["blocks"], small.totals()["dropped"]) == (10, 30)


def test_the_common_beginning_of_prompts_is_not_lost_when_the_index_is_full() -> None:
    """A system prompt, with questions that nobody asks twice, while the replicas report what others sent them."""
    fleet, now = Fleet(), [0.0]
    fleet.update({"a": None})
    placer = Placer(fleet, PlacerSettings(block_tokens=BLOCK, max_blocks=500), clock=lambda: now[0])
    placer.apply_delta("a", range(10**8, 10**8 + 1000), [])
    for number in range(100):
        prompt = Prompt(f"r{number}", [*range(400), *range(1000 * number, 1000 * number + 80)])
        fleet.open(prompt.request_id)
        placer.place(prompt, "a")
        placer.release(prompt.request_id, range(40))
        placer.apply_delta("a", held(prompt), [])
        placer.apply_delta("a", range(10**9 + 300 * number, 10**9 + 300 * (number + 1)), [])
        now[0] += 60.0
        record = placer.decision(prompt.request_id)
        assert record is not None and record.predicted_cached == (400 if number else 0)
    assert placer.totals()["dropped"] > 10_000


def test_regret_is_the_number_of_cached_tokens_that_a_cheaper_replica_lacked() -> None:
    fleet, placer = made("a", "b")
    prompt = Prompt("r", list(range(400)))
    placer.replace("a", held(prompt))
    fleet.record_load("a", ReplicaLoad(queued_prefill_tokens=100_000, prefill_rate=1000.0))
    decision = placer.place(prompt, "ab")
    assert (decision.order[0], decision.reason, decision.regret_tokens) == ("b", "cheaper", 400)
    assert placer.totals()["regret"] == 400


def test_the_last_decisions_are_kept_and_no_more() -> None:
    fleet, _ = made("a")
    placer = Placer(fleet, PlacerSettings(decisions_kept=3))
    for number in range(5):
        placer.place(Prompt(f"r{number}", [1, 2, 3]), "a")
    assert [record.request_id for record in placer.decisions(10)] == ["r4", "r3", "r2"]
    assert placer.decision("r0") is None


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_places_everything_and_its_reasons_are_metrics(policy: str) -> None:
    fleet, placer = made("a", "b", "c", policy=policy)
    for number in range(50):
        fleet.open(f"r{number}")
        session = f"s{number % 5}" if number % 2 else None
        prompt = Prompt(f"r{number}", list(range(number % 7 * 10)), session_id=session)
        assert sorted(placer.place(prompt, "abc").order) == ["a", "b", "c"]
    labels = BY_NAME["router_decisions_total"].labels
    assert placer.counts().keys() <= {(policy, reason) for reason in labels["reason"] or ()}
    assert policy in (labels["policy"] or ())


def test_the_metric_knows_every_reason() -> None:
    assert set(BY_NAME["router_decisions_total"].labels["reason"] or ()) == set(get_args(Reason))


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"cost.*random"):
        Placer(Fleet(), PlacerSettings(policy="guess"))


def test_news_and_questions_from_two_threads_do_not_disturb_each_other() -> None:
    _, placer = made("a", "b")
    prompt = Prompt("r", list(range(4000)))
    chain, stop = held(prompt), threading.Event()

    def tell() -> None:
        while not stop.is_set():
            placer.apply_delta("a", chain, [])
            placer.apply_delta("a", [], chain)
            placer.replace("b", chain)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        for number in range(300):
            placer.place(Prompt(f"r{number}", prompt.prompt_ids), "ab")
    finally:
        stop.set()
        teller.join()


def test_a_shared_prefix_attracts_all_salts_and_its_continuation_only_its_own() -> None:
    """The engine's cache reports hashes; the placer knows prompts, and expects what it sent, by the same."""
    fleet, placer = made("a", "b")
    system = list(range(1000, 1040))
    placer.share(SharedPrefixes(BLOCK, BLOCK, [system]))
    cache = KVCacheManager(100, BLOCK, block_tokens=BLOCK)
    log, prompt = cache.prefix_log, [*system, *range(40)]
    assert log is not None

    def compute(tokens: list[int], salt: str) -> None:
        lease = cache.lock(cache.match(Namespace("m", salt=salt), tokens, 0.0))
        cache.extend(lease, len(tokens))
        cache.finish(lease, tokens, 0.0)
        placer.apply_delta("b", *log.drain())

    def predicted(name: str, salt: str, tokens: list[int]) -> int:
        asked = Prompt(name, tokens, salt=salt)
        placer.place(asked, "b")
        record = placer.decision(name)
        assert record is not None and placer.uncached_tokens(asked) >= 0
        return record.predicted_cached

    compute(system, "")
    cache.share(Namespace("m"), system)
    assert [predicted(f"first-{salt}", salt, [*system, 1]) for salt in ("x", "y")] == [40, 40]
    compute(prompt, "x")
    assert predicted("again", "x", prompt) == 80
    assert predicted("other", "y", [*system, *range(20), 9]) == 40
    # The answer of a prompt that is just the prefix and less than a block is expected under its own salt.
    asked = Prompt("turn", [*system, 1], salt="z")
    fleet.open("turn")
    placer.place(asked, "b")
    placer.release("turn", [2, 3, 4, 5])
    assert predicted("next", "z", [*system, 1, 2, 3, 4, 5, 6]) == 44
    assert predicted("none", "w", [*system, 1, 2, 3, 4, 5, 6]) == 40


LARGE, SMALL = 256, 16
SLACK = 100
"""Calls by which two placements may differ, as chance draws the replicas that are compared."""


def placing(num_replicas: int, *, shared: int) -> int:
    """Return the calls that placing a prompt of 4,096 tokens takes, whose first blocks every replica holds."""
    names = [f"r{number}" for number in range(num_replicas)]
    fleet, placer = made(*names)
    prompt = Prompt("r", list(range(4096)))
    prompt.block_hashes = list(placer.block_hashes(prompt))
    for name in names:
        placer.apply_delta(name, prompt.block_hashes[:shared], [])
    fleet.open("warm-up")
    placer.place(Prompt("warm-up", [1, 2, 3]), frozenset(names))
    fleet.open("r")
    return count_calls(lambda: placer.place(prompt, frozenset(names)))


@pytest.mark.parametrize("shared", [0, 256])
def test_placing_a_prompt_takes_no_more_steps_in_a_large_fleet(shared: int) -> None:
    assert placing(LARGE, shared=shared) <= placing(SMALL, shared=shared) + SLACK


def test_the_steps_of_placing_a_prompt_do_not_grow_with_its_blocks() -> None:
    """There are 1,024 blocks; a look-up of each would be as many calls."""
    assert placing(LARGE, shared=0) < 500


def test_news_of_a_replicas_load_takes_as_many_steps_in_a_large_fleet() -> None:
    """Also where most replicas have not measured their rates, and those of the others change."""

    def calls(num_replicas: int) -> int:
        fleet, placer = made(*(names := [f"r{number}" for number in range(num_replicas)]))
        for name in names[4:]:
            fleet.record_load(name, structs.replace(IDLE, prefill_rate=0.0))
        prompts = [Prompt(f"p{number}", list(range(400))) for number in range(2)]
        fleet.open("p0")
        placer.place(prompts[0], frozenset(names))

        def hear_and_place() -> None:
            fleet.record_load("r0", structs.replace(IDLE, prefill_rate=7777.0))
            fleet.open("p1")
            placer.place(prompts[1], frozenset(names))
            assert fleet.shortest_queue() is not None

        return count_calls(hear_and_place)

    assert calls(LARGE) <= calls(SMALL) + SLACK


def test_another_policy_places_from_the_next_request_on_and_the_index_stays() -> None:
    _, placer = made("a", "b", policy="cost")
    prompt = Prompt("r", list(range(400)))
    placer.apply_delta("b", held(prompt), [])
    placer.take_over(PlacerSettings(policy="random", key_blocks=2, block_tokens=999))
    assert placer.place(prompt, "ab").policy == "random"
    assert (placer.settings.key_blocks, placer.settings.block_tokens) == (2, BLOCK)
    placer.take_over(PlacerSettings(policy="cost"))
    assert placer.place(Prompt("s", prompt.prompt_ids), "ab").order[0] == "b"


def test_a_policy_that_cannot_be_made_changes_nothing() -> None:
    _, placer = made("a", policy="cost")
    with pytest.raises(ValueError, match="no_such_module"):
        placer.take_over(PlacerSettings(policy="no_such_module:Mine", key_blocks=2))
    assert (placer.settings.policy, placer.settings.key_blocks) == ("cost", 4)
