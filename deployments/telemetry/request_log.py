"""The request log: one line per generating request, written through Ray Serve's logger when its answer ends.

Serve writes the line to the ingress's log file, as text or, with `logging.encoding: json`, as one JSON object with
Serve's own fields (asctime, levelname, message, ...) and these:

    event           "request"
    request_id      the answer's x-request-id: the client's own, or a random one
    response_id     the answer's id, "chatcmpl-..."; engines and the router know choice i as "<response_id>-<i>"
    trace_id        id of its OpenTelemetry trace; null without tracing
    ingress         the replica that answered
    endpoint        "chat_completions", "completions", "messages", "responses",
                    "embeddings", "rerank" or "score"
    model, tenant   names from the configuration; model is null when none was found
    outcome         "finished", "aborted" (the client left), "refused" (nothing was generated) or "failed"
    status          HTTP status; 499 when the client left before there was one
    finish_reason   "stop", "length", "tool_calls", "abort" or "error", of the first choice
    error_type      type of the error sent to the client
    reason          reason of a refusal, as `admission_rejections_total` counts it
    stream, num_choices
    replica, migrations, preemptions, and all other fields of `timings` (deployments/api/record/timings.py)

No line contains text of prompts or answers, or keys. All other log lines of ingresses and engines for a request
also carry its request_id: see `deployments/telemetry/serve_logging.py`.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from deployments.api.record.request_record import RequestRecord
from deployments.api.record.timings import timings_of

serve_logger = logging.getLogger("ray.serve")


class RequestLog:
    """A listener that logs each request."""

    def __init__(self, ingress: str) -> None:
        self._ingress = ingress

    def __call__(self, record: RequestRecord) -> None:
        """Log a request that has ended."""
        level = logging.WARNING if record.outcome == "failed" else logging.INFO
        if serve_logger.isEnabledFor(level):
            fields = request_fields(record)
            # Otherwise Serve would replace the engine's id in `replica` with the ingress's.
            extra = {**fields, "ingress": self._ingress, "skip_context_filter": True}
            serve_logger.log(level, _line(fields), extra=extra)


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a request's log line, which the module's docstring lists."""
    start = record.generation
    timings = msgspec.structs.asdict(timings_of(record))
    del timings["choices"]
    return {
        "event": "request",
        "request_id": record.request_id,
        "response_id": None if start is None else start.answer.id,
        "trace_id": record.trace_id,
        "endpoint": record.endpoint,
        "model": record.model,
        "tenant": record.tenant,
        "outcome": record.outcome,
        "status": record.status,
        "finish_reason": record.finish_reason,
        "error_type": record.error_type,
        "reason": record.reason,
        "ignored_fields": list(record.ignored_fields),
        "stream": start is not None and start.is_stream,
        "num_choices": 0 if start is None else len(start.choices.choices),
        **timings,
    }


def _line(fields: dict[str, Any]) -> str:
    """Return a short, readable form of the fields."""
    why = fields["reason"] or fields["error_type"] or fields["finish_reason"] or "no answer"
    where = f" at {fields['replica']}" if fields["replica"] else ""
    work = f"{fields['prompt_tokens']} + {fields['output_tokens']} tokens in {fields['total_s']:.3f} s{where}"
    return f"{fields['endpoint']} {fields['status']} {fields['outcome']} ({why}): {work}"
