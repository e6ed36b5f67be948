"""Answers the prompts of a program that calls this ingress through a Serve handle, thousands in one call.

    handle.generate_many ─▶ BatchRunner ─▶ the API, within this process ─▶ admission ─▶ router ─▶ engines

A call is one request to Serve, and each of its prompts is a request to the API: it is checked, waits for its turn,
is routed to its cached prefix, and moves to another engine when its own is lost, like any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp

from deployments.api.service.api_service import ApiService
from deployments.batch.errors import BatchStopped
from deployments.batch.prompts import Answer, Prompt, answer_of, call_for
from deployments.batch.runner import BatchCall, BatchRunner, Reply
from deployments.config.settings import BatchSettings
from deployments.config.tenants import Tenant
from deployments.ingress.in_process import InProcessApi

BATCH_TENANT = "batch"
"""Tenant of calls that name none: one of the configuration, or else one without limits."""

_NOT_SENT = Reply(499, b"{}")


class ManyPrompts:
    """Runs the calls of one ingress."""

    def __init__(
        self,
        app: ASGIApp,
        service: ApiService,
        settings: BatchSettings,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`app` is the API over `service`. Once `is_stopping`, calls end early."""
        self._app, self._service, self._settings, self._is_stopping = app, service, settings, is_stopping

    async def answers(
        self,
        prompts: Sequence[Prompt],
        fields: Mapping[str, Any] | None = None,
        *,
        tenant: str | None = None,
        max_in_flight: int | None = None,
    ) -> AsyncGenerator[list[Answer]]:
        """Yield an answer to each prompt; those that are ready together come together.

        Raises BatchStopped, or ValueError before any answer.
        """
        settings = self._settings_for(max_in_flight)
        api = InProcessApi(self._app, self._tenant(tenant))

        async def post(url: str, body: bytes) -> Reply:
            # An engine that is being stopped too would refuse for as long as this ingress may wait.
            return _NOT_SENT if self._is_stopping() else await api.post(url, body)

        runner = BatchRunner(post, settings)
        wrong: list[Answer] = []
        num_answered = 0
        async with aclosing(runner.run(self._calls(prompts, self._common(fields or {}), wrong))) as found:
            async for replies in found:
                answers = [answer_of(call.key, reply) for call, reply in replies if reply is not _NOT_SENT]
                num_answered += len(answers)
                if answers:
                    yield answers
        if wrong:
            yield wrong
        if num_answered + len(wrong) < len(prompts):
            raise BatchStopped(
                f"the ingress is being stopped after {num_answered + len(wrong)} of {len(prompts)} prompts; call "
                "again with those that have no answer"
            )

    def _calls(
        self, prompts: Sequence[Prompt], fields: Mapping[str, Any], wrong: list[Answer]
    ) -> Iterator[BatchCall[int]]:
        """Yield the requests, until the ingress is to stop; prompts that cannot be sent go to `wrong`."""
        for index, prompt in enumerate(prompts):
            if self._is_stopping():
                return
            call = call_for(index, prompt, fields)
            if isinstance(call, Answer):
                wrong.append(call)
            else:
                yield call

    def _common(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields to add to bodies that lack them: those of the call, and those of the application."""
        own: dict[str, Any] = {"priority": self._settings.priority}
        if len(names := self._service.names) == 1:
            own["model"] = names[0]
        return {**own, **fields}

    def _tenant(self, name: str | None) -> Tenant:
        tenant = self._service.access.tenant(name or BATCH_TENANT)
        if tenant is None and name is not None:
            raise ValueError(
                f"there is no tenant {name!r} in the configuration; leave tenant out to use {BATCH_TENANT!r}"
            )
        return tenant or Tenant(BATCH_TENANT)

    def _settings_for(self, max_in_flight: int | None) -> BatchSettings:
        if max_in_flight is None:
            return self._settings
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        return self._settings.model_copy(
            update={"max_in_flight": min(max_in_flight, self._settings.max_in_flight)}
        )
