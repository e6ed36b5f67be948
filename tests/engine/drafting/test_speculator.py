"""The requests for which the speculator drafts, how many tokens it drafts, and failures of the drafter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cache import Namespace
from engine.drafting.speculator import Speculator
from engine.values.request import PENDING, Request
from engine.values.sampling_params import SamplingParams


class Scripted:
    """Proposes as many tokens as it may, or none."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int]] = []
        self.is_silent = self.is_broken = False
        self.token, self.has_begun = 1, False
        self.forgotten: list[str] = []

    def propose(self, requests: Sequence[Request], max_tokens: Sequence[int]) -> list[Sequence[int]]:
        if self.is_broken:
            raise RuntimeError("scripted failure")
        self.asked.append({request.request_id: most for request, most in zip(requests, max_tokens, strict=True)})
        return [[] if self.is_silent else [self.token] * most for most in max_tokens]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


def request(name: str = "r", num_tokens: int = 10) -> Request:
    params = SamplingParams(max_tokens=1000)
    made = Request.make(name, [1] * num_tokens, params, arrival=0.0, seed=0, namespace=Namespace("m"))
    made.longest = num_tokens + 1000
    return made


class Rig:
    """A speculator whose steps take the times that the test sets."""

    def __init__(self, *, adaptive: bool = True) -> None:
        self.drafter = Scripted()
        self.speculator = Speculator(self.drafter, max_drafts=4, adaptive=adaptive)
        self.now = 0.0
        self.speculator.stepped(0, 0, 0, self.now)

    def step(self, one: Request, accepted: float = 1.0, cost: float = 0.0, wait: float = 0.0) -> int:
        """One step of a request alone: 1 s, and `cost` more per draft token, after `wait`. Returns the number of
        its draft tokens.
        """
        [draft] = self.speculator.propose([one], 100)
        self.drafter.has_begun = PENDING in draft
        num_accepted = int(accepted * len(draft))
        self.now += 1.0 + cost * len(draft) + wait
        self.speculator.verified(one, len(draft), num_accepted)
        self.speculator.stepped(1, len(draft), 0, self.now)
        one.tokens += [1] * (num_accepted + 1)
        return len(draft)


def test_the_first_step_is_plain_to_compare_with() -> None:
    rig, one = Rig(), request()
    assert [rig.step(one) for _ in range(4)] == [0, 4, 4, 4]


def test_room_and_setting_and_the_request_s_end_bound_the_draft_tokens() -> None:
    speculator = Rig(adaptive=False).speculator
    requests = [request("a"), request("b"), request("c")]
    requests[1].longest = 10 + 3  # two draft tokens and the token after them
    requests[2].longest = 10 + 1

    def counts(room: int) -> list[int]:
        return [len(draft) for draft in speculator.propose(requests, room)]

    assert counts(100) == [4, 2, 0]
    assert counts(3 * 2 * 3) == [3, 2, 0], "half of the room"
    assert counts(5) == [0, 0, 0]


def test_wrong_and_costly_draft_tokens_switch_themselves_off_and_are_tried_again() -> None:
    rig, one = Rig(), request()
    held = [rig.step(one, accepted=0.0, cost=0.3) for _ in range(300)]
    assert sum(held[:5]) > 4
    assert sum(held) < 60
    assert not all(count == 0 for count in held[100:]), "tried again"
    assert rig.now < 300 * 1.05 + 3, "it costs little to find out"


def test_costly_draft_tokens_that_are_right_stay_on() -> None:
    rig, one = Rig(), request()
    held = [rig.step(one, accepted=1.0, cost=0.3) for _ in range(100)]
    assert sum(count == 4 for count in held) > 90


def test_wrong_draft_tokens_that_cost_nothing_stay_on() -> None:
    rig, one = Rig(), request()
    held = [rig.step(one, accepted=0.0) for _ in range(100)]
    assert sum(count == 4 for count in held) > 90


def test_one_slow_step_does_not_end_drafting() -> None:
    """Without drafts, their cost would never be measured again."""
    rig, one = Rig(), request()
    held = [rig.step(one, cost=10.0 if at == 1 else 0.0) for at in range(60)]
    assert held == [0] + [4] * 59


def test_one_request_s_luck_is_not_another_s() -> None:
    rig, good, bad = Rig(), request("good"), request("bad")
    for _ in range(40):
        rig.step(good, accepted=1.0, cost=0.3)
        rig.step(bad, accepted=0.0, cost=0.3)
    assert [rig.step(good, cost=0.3), rig.step(bad, cost=0.3)] == [4, 0]


def test_only_requests_that_may_get_drafts_wait_for_results() -> None:
    rig, one = Rig(), request()
    assert rig.speculator.wants(one)
    rig.drafter.is_silent = True
    for _ in range(9):  # the first step is plain
        rig.step(one)
    assert not rig.speculator.wants(one)
    for _ in range(15):
        rig.step(one)
    assert len(rig.drafter.asked) == 8
    rig.step(one)
    assert rig.speculator.wants(one)


def test_without_adaptation_every_request_always_gets_drafts() -> None:
    rig, one = Rig(adaptive=False), request()
    rig.drafter.is_silent = True
    for _ in range(50):
        rig.step(one, accepted=0.0, cost=10.0)
    assert len(rig.drafter.asked) == 50


def test_a_step_that_waits_for_drafts_which_it_does_not_use_is_not_compared() -> None:
    """After a step with drafts, the next one waits for 2 s. If it is a plain one, the one after it is compared."""
    rig, one, held = Rig(), request(), [0]
    rig.drafter.token = PENDING
    for _ in range(150):
        held.append(rig.step(one, cost=0.25, wait=2.0 if held[-1] else 0.0))
    assert held[:4] == [0, 0, 4, 4]
    assert [at for at in range(2, 150) if held[at] == 0] == [64, 65, 128, 129]
    plain = rig.speculator._cost._of(1).plain
    assert list(plain) == [1.0] * 3
    assert rig.speculator._cost.per_draft_token(1) == pytest.approx(0.25 + 2.0 / 4)


def test_steps_without_drafts_are_compared_where_none_are_computed_behind_steps() -> None:
    rig, one = Rig(), request()
    held = [rig.step(one, cost=0.25) for _ in range(150)]
    assert [at for at in range(150) if held[at] == 0] == [0, 63, 127]
    assert len(rig.speculator._cost._of(1).plain) == 3


def test_a_drafter_that_breaks_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    rig, one = Rig(adaptive=False), request()
    rig.drafter.is_broken = True
    assert rig.speculator.propose([one], 100) == [()]
    assert "speculative decoding is off" in caplog.text
    rig.drafter.is_broken = False
    assert not rig.speculator.wants(one)
    assert rig.speculator.propose([one], 100) == [()]
    assert rig.drafter.asked == []
    rig.speculator.forget(one)


def test_a_request_that_ended_is_forgotten() -> None:
    rig, one = Rig(), request()
    rig.drafter.is_silent = True
    for _ in range(9):
        rig.step(one)
    assert not rig.speculator.wants(one)
    rig.speculator.forget(one)
    assert rig.drafter.forgotten == ["r"]
    assert rig.speculator.wants(one), "as one that is new"
