"""Rolls new versions of models out, and back: the hub decides, because it has the metrics of all processes.

    waiting ── an engine is up ──▶ running ── held long enough, within all limits ──▶ next step … ──▶ done
                                    │  ▲                                                              │
                     a limit is     │  └── resume ── paused ◀── pause                                 │
                     exceeded       ▼                                                        abort    ▼
                              rolled_back                                         ────────────▶  aborted

Ingresses ask for the states at each beat and report those that they follow. So a new hub resumes from them, and
while there is none, the weights stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deployments.client.protocol import ROLLOUT_STAGES, RolloutAction, RolloutRefused, RolloutStage, Unavailable
from deployments.config.versions import RolloutSettings, VersionPlan, label_of
from deployments.hub.version_counts import Measured, VersionCounts
from monitoring.hub import Hub, NotReady

_ACTIONS: Mapping[RolloutAction, tuple[Sequence[RolloutStage], Sequence[RolloutStage]]] = {
    "pause": (("waiting", "running"), ("paused",)),
    "resume": (("paused", "rolled_back", "aborted"), ("waiting", "running")),
    "abort": (("waiting", "running", "paused", "done"), ("rolled_back", "aborted")),
}
"""The stages that each action ends, and those in which it has been done already."""
LISTEN_S = 5.0
"""Seconds in which a new hub decides nothing: meanwhile ingresses report the states of its predecessor."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The state that ingresses follow."""

    model: str
    version: str
    """The version that is rolled out."""
    stage: RolloutStage = "waiting"
    percent: float = 0.0
    """Its share of the sessions."""
    reason: str = ""
    """Why it was rolled back."""
    changed_at: float = 0.0
    """When the state changed last, in Unix seconds; 0 before the first change. The latest state counts."""


class Rollout:
    """One model's rollout. Times are of the hub's clock, which is an argument."""

    def __init__(
        self, plan: VersionPlan, count: Callable[[float], VersionCounts], wall: Callable[[], float]
    ) -> None:
        """`count` counts the new version's requests; `wall` is the time in Unix seconds."""
        assert plan.new is not None and plan.rollout is not None
        self._settings: RolloutSettings = plan.rollout
        self._count, self._wall = count, wall
        self._began_at = 0.0
        self._base: VersionCounts | None = None
        self.state = RolloutState(plan.model, plan.new)

    def adopt(self, state: RolloutState, now: float) -> None:
        """Continue from a state that an ingress follows, if it is later. Its step begins again."""
        if state.changed_at > self.state.changed_at:
            self.state = state
            self._begin(now)

    def tick(self, now: float, *, has_engine: bool) -> None:
        """Take the next step if it is time, or roll back."""
        stage = self.state.stage
        if stage == "waiting" and has_engine:
            self._step(now)
        if stage not in ("running", "paused") or not self.state.percent:
            return
        if self._base is None:
            self._base = self._count(now)
        measured = self._measured(now)
        for name, limit in self._limits.items():
            found = measured[name]
            if found.value is not None and self._is_enough(found) and found.value > limit:
                said = f"{name} was {found.value:.4g}, above {limit:g}, in {found.num_requests} requests"
                self._change("rolled_back", 0.0, now, f"{said} at {self.state.percent:g} %")
                return
        if stage == "running" and self._held_s(now) >= self._settings.hold_s and not self._lacks(measured):
            self._step(now)

    def control(self, action: RolloutAction, now: float) -> None:
        """Obey an operator; what is so already stays. Raises RolloutRefused."""
        stage, percent = self.state.stage, self.state.percent
        changed_from, is_so = _ACTIONS[action]
        if stage not in (*changed_from, *is_so):
            raise RolloutRefused(
                f"{action} is not possible: the rollout of version {self.state.version} is {stage}"
            )
        if stage in changed_from and action == "abort":
            self._change("aborted", 0.0, now)
        elif stage in changed_from and action == "pause":
            self._change("paused", percent, now)
        elif stage in changed_from:
            self._change("running" if percent else "waiting", percent, now)

    def report(self, now: float) -> dict[str, Any]:
        """Return the state as /v1/cluster/rollouts shows it."""
        steps, measured = self._settings.steps, self._measured(now)
        is_judged = self.state.stage in ("running", "paused") and self.state.percent > 0
        return {
            "version": self.state.version,
            "state": self.state.stage,
            "percent": self.state.percent,
            "steps": list(steps),
            "step": sum(step <= self.state.percent for step in steps),
            "held_s": round(self._held_s(now), 1) if is_judged else None,
            "hold_s": self._settings.hold_s,
            "measured": {name: found.value for name, found in measured.items()} if is_judged else None,
            "num_requests": measured["error_rate"].num_requests if is_judged else None,
            "limits": self._limits,
            "reason": self.state.reason or (self._waits_for(now, measured) if is_judged else None),
            "changed_at": int(self.state.changed_at) or None,
        }

    @property
    def _limits(self) -> Mapping[str, float]:
        return self._settings.abort_on.limits

    def _measured(self, now: float) -> Mapping[str, Measured]:
        counts = VersionCounts() if self._base is None else self._count(now).since(self._base)
        return counts.measured()

    def _is_enough(self, found: Measured) -> bool:
        return found.num_requests >= self._settings.min_requests

    def _lacks(self, measured: Mapping[str, Measured]) -> list[str]:
        """Return the limits for which there are too few requests."""
        return [name for name in self._limits if not self._is_enough(measured[name])]

    def _waits_for(self, now: float, measured: Mapping[str, Measured]) -> str | None:
        lacks = self._lacks(measured) if self._held_s(now) >= self._settings.hold_s else []
        few = ", ".join(f"{measured[name].num_requests} for {name}" for name in lacks)
        return f"waits for {self._settings.min_requests} requests, has {few}" if few else None

    def _held_s(self, now: float) -> float:
        return now - self._began_at

    def _step(self, now: float) -> None:
        further = [step for step in self._settings.steps if step > self.state.percent]
        if further:
            self._change("running", further[0], now)
        else:
            self._change("done", self.state.percent, now)

    def _change(self, stage: RolloutStage, percent: float, now: float, reason: str = "") -> None:
        # A clock that was set back must not make a state older than the one before.
        changed_at = max(self._wall(), self.state.changed_at + 0.001)
        self.state = replace(self.state, stage=stage, percent=percent, reason=reason, changed_at=changed_at)
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._began_at, self._base = now, None
        with suppress(NotReady):  # of a new hub: then from the first moment at which it is
            self._base = self._count(now)


class Rollouts:
    """The versions of all models, and their rollouts."""

    def __init__(
        self, plans: Sequence[VersionPlan], hub: Hub, born: float, wall: Callable[[], float] = time.time
    ) -> None:
        """`born` is now, on the clock of all other times."""
        self._plans, self._hub, self._born = plans, hub, born
        self._rollouts = {
            plan.model: Rollout(plan, partial(self._count, label_of(plan.model, plan.new)), wall)
            for plan in plans
            if plan.new is not None
        }

    def take(self, states: Iterable[RolloutState], now: float) -> Sequence[RolloutState]:
        """Take the states that an ingress follows, and return those to follow from now on."""
        for state in states:
            rollout = self._rollouts.get(state.model)
            if rollout is not None and rollout.state.version == state.version:
                rollout.adopt(state, now)
        if not self._is_listening(now):
            self._tick(now)
        return self._states

    def report(self, now: float) -> list[dict[str, Any]]:
        """Return each model that has versions, as /v1/cluster/rollouts shows it.

        Raises Unavailable while this hub does not know the states yet.
        """
        self._check_knows(now)
        return [self._report(plan, now) for plan in self._plans]

    def control(
        self, model: str, action: RolloutAction, now: float
    ) -> tuple[dict[str, Any] | None, Sequence[RolloutState]]:
        """Obey an operator; return the model's report, or None if it has no rollout, and the states to follow.

        Raises RolloutRefused, and Unavailable while this hub does not know the states yet.
        """
        rollout = self._rollouts.get(model)
        if rollout is None:
            return None, self._states
        self._check_knows(now)
        rollout.control(action, now)
        plan = next(plan for plan in self._plans if plan.model == model)
        return self._report(plan, now), self._states

    @property
    def _states(self) -> Sequence[RolloutState]:
        return [rollout.state for rollout in self._rollouts.values()]

    def _tick(self, now: float) -> None:
        for model, rollout in self._rollouts.items():
            with suppress(NotReady):
                rollout.tick(now, has_engine=self._hub.has_engine(label_of(model, rollout.state.version), now))
        for plan in self._plans:
            for version, weight in self._weights(plan).items():
                self._hub.own.set("version_weight", weight, model=plan.model, version=version)
        for model, rollout in self._rollouts.items():
            for stage in ROLLOUT_STAGES:
                is_it = float(rollout.state.stage == stage)
                self._hub.own.set("rollout_state", is_it, model=model, version=rollout.state.version, state=stage)

    def _weights(self, plan: VersionPlan) -> dict[str, float]:
        rollout = self._rollouts.get(plan.model)
        return plan.weights_at(0.0 if rollout is None else rollout.state.percent)

    def _report(self, plan: VersionPlan, now: float) -> dict[str, Any]:
        rollout = self._rollouts.get(plan.model)
        return {
            "model": plan.model,
            "weights": self._weights(plan),
            "rollout": None if rollout is None else rollout.report(now),
        }

    def _check_knows(self, now: float) -> None:
        if self._rollouts and self._is_listening(now):
            raise Unavailable("the metrics hub is new and learns the state of rollouts; try again in seconds")

    def _is_listening(self, now: float) -> bool:
        return now - self._born < LISTEN_S

    def _count(self, model_name: str, now: float) -> VersionCounts:
        return VersionCounts.of(self._hub.totals_of(model_name, now), model_name)
