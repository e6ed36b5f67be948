"""Traces as a collector receives them, from the API, the client, the wire and real engines."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.settings import TracingSettings
from deployments.telemetry import tracing
from deployments.telemetry.tracing import open_tracing
from tests.deployments.support.api_over_engines import PROMPT, api_over, events
from tests.deployments.support.in_process_engines import SILENCE, until
from tests.deployments.support.otlp_receiver import Collector, Received, collector
from tests.deployments.support.time_limit import run_scenario

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "stop here, please"
PHASES = ["route", "queue", "prefill", "decode"]


def settings(url: str | None, **fields: Any) -> TracingSettings:
    return TracingSettings.model_validate({"otlp_endpoint": url, "export_period_s": 0.02, **fields})


@pytest.fixture
def sink() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture
def tracer(sink: Collector) -> Iterator[tracing.Tracer]:
    made = open_tracing(settings(sink.url), "ingress-1")
    assert made is not None
    yield made
    made.close()


def check_tree(spans: list[Received]) -> tuple[Received, list[Received]]:
    """The root and its children, which lie within it and, choice by choice, one after the other."""
    root, *children = spans
    assert {span.trace_id for span in spans} == {root.trace_id}
    by_choice: dict[Any, int] = {}
    for child in children:
        assert child.parent_id == root.span_id and root.start <= child.start <= child.end <= root.end
        choice = child.attributes.get("raydix.choice")
        assert child.start >= by_choice.get(choice, 0), child.name
        by_choice[choice] = child.end
    return root, children


def test_a_requests_spans_follow_each_other_inside_its_own(sink: Collector, tracer: tracing.Tracer) -> None:
    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            api.engines.runners[0].step_s = 0.01
            before = time.time_ns()
            answer = await api.complete(
                {"traceparent": PARENT, "x-request-id": "mine"}, temperature=0.5, top_p=0.9, seed=3, stop=SECRET
            )
            body, after = answer.json(), time.time_ns()
        (spans,) = await asyncio.to_thread(sink.traces, 1)
        root, children = check_tree(spans)
        assert (
            root.name == "text_completion m" and root.trace_id == PARENT[3:35] and root.parent_id == PARENT[36:52]
        )
        assert before <= root.start < root.end <= after + 10**6
        assert [child.name for child in children] == [
            "prepare",
            "admission",
            "route",
            "queue",
            "prefill",
            "decode",
        ]
        expected = {
            **{"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "raydix"},
            **{"gen_ai.request.model": "m", "gen_ai.response.model": "m", "gen_ai.response.id": body["id"]},
            **{"gen_ai.request.max_tokens": 8, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9},
            **{"gen_ai.request.seed": 3, "gen_ai.response.finish_reasons": ["length"]},
            **{"gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 8},
            **{"gen_ai.usage.cache_read.input_tokens": 0, "http.response.status_code": 200},
            **{"raydix.request_id": "mine", "raydix.outcome": "finished"},
        }
        assert root.attributes | expected == root.attributes and "error.type" not in root.attributes
        assert root.resource["service.name"] == "raydix" and root.resource["service.instance.id"] == "ingress-1"
        seconds = {child.name: (child.end - child.start) / 1e9 for child in children}
        for phase in ("prefill", "decode"):
            assert seconds[phase] == pytest.approx(body["timings"][f"{phase}_s"], abs=2e-6)
        assert children[-1].attributes == {
            **{"raydix.replica": "r0", "raydix.preemptions": 0, "raydix.recomputed_tokens": 0}
        }
        assert api.reports[0].trace_id == root.trace_id
        for span in spans:
            assert SECRET not in str(span) and body["choices"][0]["text"] not in str(span)

    run_scenario(scenario())
    assert sink.paths == {"/v1/traces"}


def test_a_stream_that_moved_shows_both_replicas_and_the_loss(sink: Collector, tracer: tracing.Tracer) -> None:
    async def scenario() -> None:
        async with api_over(2, tracer, health=SILENCE) as api:
            api.engines.runners[0].step_s = 0.02
            asked = asyncio.create_task(api.complete(stream=True, max_tokens=200))
            await until(lambda: any(stream.journal.num_tokens > 5 for stream in api.client._tasks))
            api.engines.fall_silent(0)
            *_, last = events(await asked)
        (spans,) = await asyncio.to_thread(sink.traces, 1)
        root, children = check_tree(spans)
        assert [child.name for child in children] == ["prepare", "admission", *PHASES, *PHASES]
        assert [child.attributes["raydix.replica"] for child in children[2:]] == ["r0"] * 4 + ["r1"] * 4
        assert children[-1].attributes["raydix.recomputed_tokens"] == last["timings"]["recomputed_tokens"]
        ((name, at, lost),) = root.events
        assert (name, lost["raydix.replica"]) == ("migration", "r0") and lost["raydix.reason"]
        assert children[5].end <= at <= children[6].start
        first = last["timings"]["time_to_first_token_s"]
        assert root.attributes["gen_ai.response.time_to_first_chunk"] == pytest.approx(first, abs=1e-5)

    run_scenario(scenario())


def test_a_request_with_many_choices_has_a_bounded_number_of_spans(
    sink: Collector, tracer: tracing.Tracer
) -> None:
    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            await api.complete(n=2, prompt=[PROMPT] * 10, max_tokens=1)
        ((root, *children),) = await asyncio.to_thread(sink.traces, 1)
        assert root.attributes["gen_ai.usage.output_tokens"] == 20
        assert len({child.attributes.get("raydix.choice") for child in children} - {None}) == 8

    run_scenario(scenario())


def test_each_choice_has_spans_of_its_own(sink: Collector, tracer: tracing.Tracer) -> None:
    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            await api.complete(n=2)
        (spans,) = await asyncio.to_thread(sink.traces, 1)
        root, children = check_tree(spans)
        assert root.attributes["gen_ai.request.choice.count"] == 2
        for choice in range(2):
            own = [child.name for child in children if child.attributes.get("raydix.choice") == choice]
            assert own == ["admission", *PHASES]

    run_scenario(scenario())


@pytest.mark.parametrize(
    ("asked", "status", "name", "is_error"),
    [
        ({"max_tokens": -1}, 400, "text_completion m", False),
        ({"model": "no\nsuch"}, 404, "text_completion", False),
    ],
)
def test_a_refused_request_is_one_span(
    sink: Collector, tracer: tracing.Tracer, asked: dict[str, Any], status: int, name: str, is_error: bool
) -> None:
    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            assert (await api.complete({"traceparent": "not-a-trace"}, **asked)).status_code == status
        ((root,),) = await asyncio.to_thread(sink.traces, 1)
        assert (root.name, root.is_error, root.parent_id) == (name, is_error, "")
        assert root.attributes["http.response.status_code"] == status
        assert root.attributes["error.type"] in ("invalid_request_error", "not_found_error")
        assert "such" not in str(root)

    run_scenario(scenario())


@pytest.mark.parametrize(("ratio", "flags", "is_traced"), [(0, "01", True), (0, None, False), (1, "00", False)])
def test_a_share_is_traced_and_a_caller_s_decision_followed(
    sink: Collector, ratio: float, flags: str | None, is_traced: bool
) -> None:
    tracer = open_tracing(settings(sink.url, sample_ratio=ratio), "ingress-1")
    assert tracer is not None
    headers = {} if flags is None else {"traceparent": PARENT[:-2] + flags}

    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            await api.complete(headers)
            assert (api.reports[0].trace_id is not None) == is_traced

    run_scenario(scenario())
    tracer.close()
    tracer.close()
    assert bool(sink.spans) == is_traced


class Messages(logging.Handler):
    """Collects OpenTelemetry's messages in Serve's logger, which pytest's handlers do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kinds += [record.msg] if record.name.startswith("opentelemetry") else []


def test_a_collector_that_is_away_costs_requests_nothing_and_few_warnings() -> None:
    """At most two spans wait, every export fails at once, and the last attempt at the end is bounded."""
    warnings, logger = Messages(), logging.getLogger("ray.serve")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        away = settings(f"http://127.0.0.1:{closed.getsockname()[1]}", max_waiting_spans=2, export_timeout_s=0.2)
        tracer = open_tracing(away, "ingress-1")
        assert tracer is not None
        logger.addHandler(warnings)

        async def scenario() -> None:
            async with api_over(1, tracer) as api:
                for _ in range(20):
                    assert (await api.complete()).status_code == 200
                    await asyncio.sleep(0.02)

        try:
            run_scenario(scenario())
            tracer.close()
        finally:
            logger.removeHandler(warnings)
    assert warnings.kinds and len(warnings.kinds) == len(set(warnings.kinds))


def test_a_collector_that_refuses_is_tried_again_with_the_next_spans(sink: Collector) -> None:
    sink.status = 400
    tracer = open_tracing(settings(sink.url), "ingress-1")
    assert tracer is not None

    async def scenario() -> None:
        async with api_over(1, tracer) as api:
            await api.complete()
            await until(lambda: sink.num_posts > 0, timeout=60)
            sink.status = 200
            await api.complete()
        await asyncio.to_thread(sink.traces, 1)

    run_scenario(scenario())
    tracer.close()


def test_without_the_sdk_the_application_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.app import build

    args = AppArgs.model_validate({"tracing": {"otlp_endpoint": "http://collector:4318"}})
    assert args.tracing.otlp_endpoint == "http://collector:4318/v1/traces"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it could not be imported
    with pytest.raises(RuntimeError, match=r"pip install 'raydix\[tracing\]'"):
        build(args)


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://", ""])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ValidationError, match="http://collector:4318"):
        TracingSettings(otlp_endpoint=url)
