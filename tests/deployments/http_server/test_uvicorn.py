"""uvicorn has the names that `Connection` and `GatheredWrites` rely on (docs/frameworks.md)."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from uvicorn.protocols.http import flow_control, httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from deployments.http_server import connection

CYCLE = {
    "response_started",
    "response_complete",
    "more_body",
    "keep_alive",
    "body",
    "disconnected",
    "message_event",
}
PROTOCOL = {
    "loop",
    "transport",
    "flow",
    "parser",
    "headers",
    "scope",
    "cycle",
    "timeout_keep_alive",
    "server_state",
}
OVERRIDDEN = {
    "connection_made", "connection_lost", "pause_writing", "resume_writing", "shutdown", "data_received",
    "on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete",
    "on_response_complete",
}  # fmt: skip


def assigned(kind: type) -> set[str]:
    """Return the attributes that a class's methods set on themselves, and those that it names."""
    tree = ast.parse(Path(inspect.getfile(kind)).read_text())
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def test_the_protocol_and_its_cycle_have_the_attributes_that_are_used() -> None:
    assert assigned(HttpToolsProtocol) >= PROTOCOL
    assert assigned(RequestResponseCycle) >= CYCLE


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_uvicorn_or_its_parser_calls_the_overridden_methods(name: str) -> None:
    ours, theirs = getattr(connection.Connection, name), getattr(HttpToolsProtocol, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)


def test_the_list_has_all_that_is_overridden() -> None:
    own = {name for name in vars(connection.Connection) if not name.startswith("_")}
    assert {name for name in own if hasattr(HttpToolsProtocol, name)} == OVERRIDDEN


def test_reading_is_paused_and_resumed_by_the_flow_control() -> None:
    assert {"pause_reading", "resume_reading"} <= set(vars(flow_control.FlowControl))
    assert flow_control.HIGH_WATER_LIMIT > 0


def test_a_transport_is_written_to_and_closed_by_methods_that_gather() -> None:
    """Everything that could overtake gathered bytes is one of ours; the rest only asks or bounds."""
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(inspect.getsource(httptools_impl)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr == "transport"
    }
    harmless = {"is_closing", "get_extra_info", "pause_reading", "resume_reading", "set_protocol"}
    assert calls - harmless <= {"write", "close"}
