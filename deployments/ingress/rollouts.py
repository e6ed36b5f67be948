"""Follows the rollouts of new versions: at each beat the hub says which share of the sessions each of them gets.

While the hub does not answer, the weights stay. The states that it said are reported to it, so that its successor
resumes from them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.api.served.versions import Versions
from deployments.client.protocol import RolloutAction, RolloutRefused, Unavailable
from deployments.config.versions import VersionPlan
from deployments.hub.rollouts import RolloutState
from deployments.telemetry.background import Background
from deployments.wire.deadlines.time_limit import timeout

logger = logging.getLogger("ray.serve")

TIMEOUT_S = 5.0
"""Seconds that the hub has to answer."""


class RolloutFollower(Background):
    """Sets the weights of this ingress, and passes an operator's orders to the hub. `hub` is a `HubCalls`."""

    def __init__(self, hub: Any, plans: Sequence[VersionPlan], versions: Mapping[str, Versions]) -> None:
        """`versions` are the models that have versions, by name."""
        self._hub, self._versions = hub, versions
        self._plans = {plan.model: plan for plan in plans}
        self._states: Sequence[RolloutState] = ()

    async def ask(self) -> None:
        """Follow the hub's present states, if it says them in time: before the first request."""
        with contextlib.suppress(Exception), timeout(TIMEOUT_S):
            self._take(await self._hub.rollouts.remote(self._states))

    async def report(self) -> list[dict[str, Any]]:
        """Return each model that has versions, with their weights and its rollout. Raises Unavailable."""
        return list(await self._call("report_rollouts"))

    async def control(self, model: str, action: RolloutAction) -> dict[str, Any] | None:
        """Give an order; return the model's report. Raises RolloutRefused or Unavailable."""
        answer: tuple[dict[str, Any] | None, Sequence[RolloutState]]
        answer = await self._call("control_rollout", model, action)
        report, states = answer
        self._take(states)  # so that the hub's successor hears of the order even if this hub dies now
        return report

    async def _run(self) -> None:
        while True:
            await self.ask()
            await self._hub.beat()

    async def _call(self, method: str, *args: str) -> Any:
        try:
            with timeout(TIMEOUT_S):
                return await getattr(self._hub, method).remote(*args)
        except (RolloutRefused, Unavailable):
            raise
        except Exception as error:
            reason = "in time" if isinstance(error, TimeoutError) else f"({type(error).__name__})"
            raise Unavailable(f"the metrics hub, which controls rollouts, does not answer {reason}") from None

    def _take(self, states: Sequence[RolloutState]) -> None:
        for state in states:
            plan = self._plans.get(state.model)
            if plan is None or plan.new != state.version or state in self._states:
                continue  # a hub of another configuration said it, or nothing has changed
            self._versions[state.model].weights = plan.weights_at(state.percent)
            why = f": {state.reason}" if state.reason else ""
            logger.info(
                "%s gets %g %% of the sessions of %s (%s)%s",
                state.version,
                state.percent,
                state.model,
                state.stage,
                why,
            )
        self._states = states
