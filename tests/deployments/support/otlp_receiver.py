"""A real OTLP/HTTP collector in this process, which parses the posted protobuf and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Received:
    """A received span."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    """Unix time in nanoseconds."""
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    is_error: bool
    resource: dict[str, Any]


@dataclass
class Collector:
    """The spans and requests received so far."""

    url: str
    spans: list[Received] = field(default_factory=list)
    num_posts: int = 0
    paths: set[str] = field(default_factory=set)
    status: int = 200
    """HTTP status of its answers."""

    def traces(self, count: int, timeout: float = 60.0) -> list[list[Received]]:
        """Wait for `count` traces with their roots; the spans of each are sorted by start, the root first."""
        deadline = time.monotonic() + timeout
        while len(made := self._complete()) < count:
            assert time.monotonic() < deadline, f"{len(made)} of {count} traces, {self.num_posts} posts"
            time.sleep(0.01)
        return made

    def _complete(self) -> list[list[Received]]:
        by_trace: dict[str, list[Received]] = {}
        for span in list(self.spans):
            by_trace.setdefault(span.trace_id, []).append(span)
        is_root = trace_pb2.Span.SPAN_KIND_SERVER
        ordered = [
            sorted(spans, key=lambda span: (span.start, span.kind != is_root)) for spans in by_trace.values()
        ]
        return [spans for spans in ordered if spans[0].kind == is_root]


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.num_posts += 1
            received.paths.add(self.path)
            if received.status == 200:
                received.spans += _spans(body)
            self.send_response(received.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


def _spans(body: bytes) -> list[Received]:
    return [
        Received(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _plain(span.attributes),
            [(event.name, event.time_unix_nano, _plain(event.attributes)) for event in span.events],
            span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
            _plain(resource.resource.attributes),
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind or "string_value")
