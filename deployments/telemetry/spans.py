"""Traces of requests, created when a request has ended from the times in its record.

    chat demo                     SERVER: arrival ... answer sent      events: migration
    ├─ prepare                    body, checks, chat template, tokens
    ├─ admission                  wait in the ingress, tenant by tenant
    ├─ route ─ queue ─ prefill ─ decode       at r0: `route` until the engine has it, the rest by the engine
    └─ route ─ queue ─ prefill ─ decode       at r1, when r0 was lost

From `admission` on there is one of each per choice, for the first few choices. An engine reports durations, which
are counted back from its last token's arrival: clocks of different machines are never compared, and network
time is part of `route`. Attributes follow OpenTelemetry's conventions for generative AI (v1.41, in development);
our own begin with "raydix.". They contain no text of prompts, answers or stop strings. Importing this module
imports OpenTelemetry's SDK, so `deployments/telemetry/tracing.py` does so only when tracing is on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.api.record.observation import ENDPOINTS
from deployments.api.record.request_record import GenerationStart, RequestRecord
from deployments.client.timeline import Timeline
from deployments.config.settings import TracingSettings
from deployments.telemetry.serve_logging import log_seldom_through_serve

MAX_CHOICES = 8
"""Most choices with their own spans: a request may have hundreds, and each costs the event loop 0.15 ms."""
_BATCH = 512
_OPERATIONS: Mapping[str, str] = {
    "chat_completions": "chat",
    "completions": "text_completion",
    "messages": "chat",
    "responses": "chat",
    "embeddings": "embeddings",
    "rerank": "rerank",
    "score": "score",
}
_PATHS: Mapping[str, str] = {endpoint: path for path, endpoint in reversed(list(ENDPOINTS.items()))}
"""The first path of each endpoint."""


class OtlpTracer:
    """A listener that sends each request's spans to a collector, in batches and from its own thread.

    A slow or absent collector does not delay requests: spans are queued up to a bound, then the oldest dropped.
    """

    def __init__(self, settings: TracingSettings, ingress: str) -> None:
        """`settings.otlp_endpoint` must be set."""
        assert settings.otlp_endpoint is not None
        resource = Resource.create({"service.name": settings.service_name, "service.instance.id": ingress})
        sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(settings.otlp_endpoint, timeout=settings.export_timeout_s)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=settings.max_waiting_spans,
                schedule_delay_millis=settings.export_period_s * 1000,
                max_export_batch_size=min(_BATCH, settings.max_waiting_spans),
            )
        )
        self._timeout_s = settings.export_timeout_s
        self._tracer = self._provider.get_tracer("raydix")
        self._propagator = TraceContextTextMapPropagator()
        self._is_closed = False
        log_seldom_through_serve("opentelemetry")

    def __call__(self, record: RequestRecord) -> None:
        """Trace a request that has ended, if it is sampled."""
        clock = _Clock(record)
        operation = _OPERATIONS[record.endpoint]
        root = self._tracer.start_span(
            operation if record.model is None else f"{operation} {record.model}",
            self._propagator.extract(record.headers, Context()),
            SpanKind.SERVER,
            start_time=clock.ns(record.arrival),
        )
        if root.is_recording():
            record.trace_id = trace.format_trace_id(root.get_span_context().trace_id)
            root.set_attributes(_attributes(record))
            if record.status >= 500 or record.outcome == "failed":
                root.set_status(StatusCode.ERROR)
            if record.generation is not None:
                self._add_children(root, record, record.generation.choices.timelines, clock)
        root.end(clock.ns(record.ended_at or time.monotonic()))

    def close(self) -> None:
        """Send the remaining spans. Blocks for at most about the timeout of one export. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # The provider would wait three times as long for an absent collector.
        deadline = threading.Timer(self._timeout_s, self._exporter.shutdown)
        deadline.daemon = True
        deadline.start()
        self._provider.shutdown()
        deadline.cancel()

    def _add_children(self, root: Span, record: RequestRecord, timelines: list[Timeline], clock: _Clock) -> None:
        inside = trace.set_span_in_context(root, Context())

        def add(name: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=clock.ns(start))
            span.end(clock.ns(end))

        if timelines:
            add("prepare", record.arrival, min(timeline.asked_at for timeline in timelines), {})
        for index, timeline in enumerate(timelines[:MAX_CHOICES]):
            choice = {"raydix.choice": index} if len(timelines) > 1 else {}
            add("admission", timeline.asked_at, timeline.sent_at, choice)
            for span in timeline.spans:
                reported = (
                    {}
                    if span.timings is None
                    else {
                        "raydix.preemptions": span.timings.num_preemptions,
                        "raydix.recomputed_tokens": span.timings.num_recomputed,
                    }
                )
                for name, start, end in span.phases():
                    add(name, start, end, {"raydix.replica": span.replica, **reported, **choice})
            for lost in timeline.migrations:
                what: dict[str, Any] = {
                    "raydix.replica": lost.replica or "",
                    "raydix.reason": lost.reason,
                    **choice,
                }
                root.add_event("migration", what, clock.ns(lost.at))


class _Clock:
    """Converts a request's monotonic times to Unix time in nanoseconds."""

    def __init__(self, record: RequestRecord) -> None:
        self._offset = record.arrived_at - record.arrival

    def ns(self, at: float) -> int:
        return int((at + self._offset) * 1e9)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of the root span."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS[record.endpoint],
        "gen_ai.provider.name": "raydix",
        "gen_ai.request.model": record.model,
        "http.request.method": "POST",
        "http.route": _PATHS[record.endpoint],
        "http.response.status_code": record.status,
        "error.type": record.error_type,
        "raydix.request_id": record.request_id,
        "raydix.tenant": record.tenant,
        "raydix.outcome": record.outcome,
        "raydix.reason": record.reason,
    }
    if record.generation is not None:
        attributes |= _generation(record, record.generation)
    return {name: value for name, value in attributes.items() if value is not None}


def _generation(record: RequestRecord, start: GenerationStart) -> dict[str, Any]:
    """Return the attributes of the generation: its parameters and results."""
    sampling, choices = start.sampling, start.choices.choices
    usage, first = start.answer.usage(choices), record.first_token_at
    return {
        "gen_ai.request.stream": start.is_stream,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": len(choices) if len(choices) > 1 else None,
        "gen_ai.response.id": start.answer.id,
        "gen_ai.response.model": start.answer.model,
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices if choice.finish_reason],
        "gen_ai.response.time_to_first_chunk": first - record.arrival if first and start.is_stream else None,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.usage.reasoning.output_tokens": usage["completion_tokens_details"]["reasoning_tokens"],
    }
