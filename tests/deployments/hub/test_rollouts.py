"""Rollouts on a clock of their own: steps, limits, too few requests, orders, and hubs that change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.client.protocol import RolloutAction, RolloutRefused, Unavailable
from deployments.config.versions import RolloutSettings, VersionPlan
from deployments.hub.rollouts import LISTEN_S, Rollouts, RolloutState
from monitoring.hub import Hub
from monitoring.metrics import Metrics

SETTINGS: dict[str, Any] = {"steps": [10, 50, 100], "hold_s": 60, "abort_on": {"error_rate": 0.1}}
ENDED = {"endpoint": "completions", "streaming": "true", "finish_reason": "stop"}
FAILED = {"endpoint": "completions", "status": "500", "error_type": "server_error"}


class Story:
    """A hub with one rollout, an ingress that asks it each second, and the new version's requests."""

    def __init__(self, has_engine: bool = True, **settings: Any) -> None:
        rollout = RolloutSettings.model_validate(SETTINGS | settings)
        self.plan = VersionPlan("chat", {"v1": 1.0, "v2": 0.0}, "v2", rollout)
        self.now, self.has_engine = 0.0, has_engine
        self.wall_is_behind_s = 0.0
        self.requests, self.engine = Metrics("chat@v2", "i1", "ingress"), Metrics("chat@v2", "r1", "engine")
        self.states: Any = ()
        self.replace_hub()

    def replace_hub(self) -> None:
        self.hub = Hub(born=self.now)
        self.rollouts = Rollouts(
            [self.plan], self.hub, self.now, wall=lambda: 1e9 + self.now - self.wall_is_behind_s
        )

    def pass_s(self, seconds: float, requests: int = 0, errors: int = 0, ttft_s: float = 0.05) -> Story:
        """Let time pass, in each second of which so many requests end well and badly."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            self.requests.inc("requests_total", requests, **ENDED)
            self.requests.inc("request_errors_total", errors, **FAILED)
            self.requests.observe("time_to_first_token_seconds", ttft_s, requests)
            self.engine.set("engine_up", float(self.has_engine))
            self.hub.push("i1", self.requests.snapshot(), self.now)
            self.hub.push("r1", self.engine.snapshot(), self.now)
            self.states = self.rollouts.take(self.states, self.now)
        return self

    def begun(self) -> Story:
        """Let the rollout reach its first step."""
        return self.pass_s(LISTEN_S)

    def order(self, action: RolloutAction) -> None:
        report, self.states = self.rollouts.control("chat", action, self.now)
        assert report is not None

    @property
    def state(self) -> RolloutState:
        (state,) = self.rollouts.take((), self.now)
        return state

    @property
    def is_at(self) -> tuple[str, float]:
        return self.state.stage, self.state.percent

    @property
    def report(self) -> dict[str, Any]:
        (of_model,) = self.rollouts.report(self.now)
        assert of_model["weights"] == pytest.approx(self.plan.weights_at(self.state.percent))
        rollout: dict[str, Any] = of_model["rollout"]
        return rollout


def test_a_good_version_gets_all_sessions_step_by_step() -> None:
    story = Story().begun()
    assert story.is_at == ("running", 10)
    seen = [(story.pass_s(20, requests=1).is_at) for _ in range(10)]
    assert seen == [
        *[("running", 10)] * 2,
        *[("running", 50)] * 3,
        *[("running", 100)] * 3,
        *[("done", 100)] * 2,
    ]


def test_it_gets_no_session_before_one_of_its_engines_runs() -> None:
    story = Story(has_engine=False).begun().pass_s(300)
    assert story.is_at == ("waiting", 0)
    story.has_engine = True
    assert story.pass_s(1).is_at == ("running", 10)


def test_too_few_requests_make_a_step_longer_and_say_so() -> None:
    story = Story(min_requests=20).begun().pass_s(19, requests=1).pass_s(600)
    assert story.is_at == ("running", 10)
    assert story.report["reason"] == "waits for 20 requests, has 19 for error_rate"
    assert story.pass_s(1, requests=1).is_at == ("running", 50)


def test_each_limit_needs_its_requests() -> None:
    """Requests without a first token say nothing about the time to it."""
    story = Story(abort_on={"error_rate": 0.5, "ttft_p95": 1.0}).begun().pass_s(60, requests=1, errors=0)
    assert story.is_at == ("running", 50)
    story.requests.inc("requests_total", 1000, **ENDED)
    story.pass_s(300)
    assert story.is_at == ("running", 50)
    assert story.report["reason"] == "waits for 20 requests, has 0 for ttft_p95"


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_bad_version_is_rolled_back_at_any_step_before_its_end(step: int) -> None:
    story = Story().begun().pass_s(60 * step, requests=1)
    percent = story.state.percent
    story.pass_s(25, requests=1).pass_s(4, errors=1)
    assert story.is_at[0] == "rolled_back", story.report
    assert story.state.percent == 0
    assert story.state.reason == f"error_rate was 0.1071, above 0.1, in 28 requests at {percent:g} %"
    assert story.pass_s(600, requests=10).is_at == ("rolled_back", 0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"ttft_p95": 0.8}, "ttft_p95 was 0.975, above 0.8, in 20 requests at 10 %"),
        ({"ttft_p95": 1.0}, ""),
    ],
)
def test_slow_first_tokens_are_a_reason(limits: dict[str, float], reason: str) -> None:
    story = Story(abort_on=limits).begun().pass_s(20, requests=1, ttft_s=0.9)
    assert (story.state.stage, story.state.reason) == ("rolled_back" if reason else "running", reason)


def test_few_requests_are_no_reason() -> None:
    assert Story(min_requests=20).begun().pass_s(19, errors=1).is_at == ("running", 10)


def test_requests_before_a_step_do_not_count() -> None:
    story = Story()
    story.requests.inc("request_errors_total", 1000, **FAILED)
    assert story.begun().pass_s(61, requests=1).is_at == ("running", 50)


def test_a_paused_rollout_stays_but_is_still_rolled_back() -> None:
    story = Story().begun()
    story.order("pause")
    assert story.pass_s(600, requests=1).is_at == ("paused", 10)
    story.order("pause")
    story.order("resume")
    assert story.pass_s(59, requests=1).is_at == ("running", 10)
    assert story.pass_s(2, requests=1).is_at == ("running", 50)
    story.order("pause")
    assert story.pass_s(30, errors=1).is_at == ("rolled_back", 0)


def test_one_that_was_paused_before_it_began_waits_again() -> None:
    story = Story(has_engine=False).begun()
    story.order("pause")
    story.has_engine = True
    assert story.pass_s(60).is_at == ("paused", 0)
    story.order("resume")
    assert story.pass_s(1).is_at == ("running", 10)


def test_one_that_is_done_can_be_aborted_and_begun_again() -> None:
    story = Story(steps=[100], hold_s=1).begun().pass_s(3, requests=30)
    assert story.is_at == ("done", 100)
    story.order("abort")
    story.order("abort")
    assert story.pass_s(60).is_at == ("aborted", 0)
    story.order("resume")
    assert story.pass_s(1).is_at == ("running", 100)


def test_impossible_orders_are_refused() -> None:
    story = Story(steps=[100], hold_s=1).begun().pass_s(3, requests=30)
    for action in ("pause", "resume"):
        with pytest.raises(RolloutRefused, match=f"{action} is not possible: the rollout of version v2 is done"):
            story.order(action)
    story.order("abort")
    with pytest.raises(RolloutRefused, match="is aborted"):
        story.order("pause")
    assert story.rollouts.control("other", "pause", story.now) == (None, [story.state])


def test_a_new_hub_resumes_from_what_ingresses_follow_and_holds_the_step_again() -> None:
    story = Story().begun().pass_s(70, requests=1)
    assert story.is_at == ("running", 50)
    story.replace_hub()
    assert story.rollouts.take((), story.now)[0].percent == 0  # to an ingress that follows nothing yet
    with pytest.raises(Unavailable, match="is new"):
        story.order("abort")
    with pytest.raises(Unavailable, match="is new"):
        story.rollouts.report(story.now)
    assert story.pass_s(1).is_at == ("running", 50)
    assert story.pass_s(58, requests=1).is_at == ("running", 50)
    assert story.pass_s(5, requests=1).is_at == ("running", 100)


@pytest.mark.parametrize("action", ["pause", "abort"])
def test_a_new_hub_keeps_an_order(action: RolloutAction) -> None:
    story = Story().begun()
    story.order(action)
    before = story.pass_s(1).is_at
    story.replace_hub()
    assert story.pass_s(600, requests=1).is_at == before


def test_a_new_hub_with_other_steps_takes_the_next_above_the_present_share() -> None:
    story = Story().begun()
    story.plan = replace(story.plan, rollout=RolloutSettings.model_validate(SETTINGS | {"steps": [5, 25, 100]}))
    story.replace_hub()
    assert story.pass_s(1).is_at == ("running", 10)
    assert story.pass_s(60, requests=1).is_at == ("running", 25)


def test_a_new_hub_keeps_the_last_state_even_if_the_clock_was_set_back() -> None:
    story = Story().begun()
    before = story.state
    story.wall_is_behind_s = 3600.0
    story.order("abort")
    after = story.state
    story.replace_hub()
    for late in (after, before):  # of two ingresses, of which one has not heard of the order
        story.rollouts.take([late], story.now)
    assert story.is_at == ("aborted", 0)


def test_states_of_other_versions_and_older_ones_change_nothing() -> None:
    story = Story().begun()
    before = story.state
    for other in (
        replace(before, version="v3", percent=99, changed_at=2e9),
        replace(before, model="other", percent=99, changed_at=2e9),
        replace(before, percent=99, changed_at=before.changed_at - 1),
    ):
        assert story.rollouts.take([other], story.now) == [before]


def test_weights_and_states_are_metrics() -> None:
    story = Story().begun()
    page = story.hub.render(story.now).decode()
    for line in (
        'raydix_version_weight{model="chat",model_name="",replica="hub",version="v1"} 0.9',
        'raydix_version_weight{model="chat",model_name="",replica="hub",version="v2"} 0.1',
        'raydix_rollout_state{model="chat",model_name="",replica="hub",state="running",version="v2"} 1.0',
        'raydix_rollout_state{model="chat",model_name="",replica="hub",state="done",version="v2"} 0.0',
    ):
        assert line in page


def test_a_model_without_a_rollout_has_its_weights() -> None:
    rollouts = Rollouts([VersionPlan("chat", {"a": 3.0, "b": 1.0})], Hub(), 0.0)
    assert rollouts.take((), 60.0) == []
    assert rollouts.report(60.0) == [{"model": "chat", "weights": {"a": 0.75, "b": 0.25}, "rollout": None}]


SECONDS = st.tuples(st.integers(1, 90), st.integers(0, 3), st.integers(0, 1))


@given(st.lists(st.one_of(SECONDS, st.sampled_from(["pause", "resume", "abort", "hub"])), max_size=12))
def test_the_share_only_rises_by_one_step_or_falls_to_nothing(events: list[Any]) -> None:
    story, shares = Story().begun(), [0.0, 10.0, 50.0, 100.0]
    for event in events:
        before = story.state
        if event == "hub":
            story.replace_hub()
            story.pass_s(LISTEN_S)
        elif isinstance(event, str):
            try:
                story.order(event)  # type: ignore[arg-type]
            except RolloutRefused:
                assert story.state == before
        else:
            story.pass_s(*event)
        after = story.state.percent
        steps = shares.index(after) - shares.index(before.percent)
        assert after == 0 or 0 <= steps <= (2 if isinstance(event, tuple) else 1)
        assert steps == 0 or before.stage != "paused" or after == 0
        assert before.stage not in ("rolled_back", "aborted") or after == 0 or event == "resume"
