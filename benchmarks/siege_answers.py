"""Whether an answer keeps what docs/api.md promises: a proper success or a proper error, and never a defect.

An error says what was wrong in a whole sentence. Where a bound of the server was the cause, it names the setting.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.config.args import AppArgs
from deployments.config.tenants import TenantSettings
from engine.settings.config import EngineConfig

_ERROR_KEYS = {"message", "type", "param", "code"}
_OF_BOUNDS = {408, 413, 429, 431, 504}
_MEANT_500 = {"ends_engines"}
"""The codes of a 500 that is no defect: what died under the request was killed by the siege itself."""
_MEANT_SETTING = "health.max_lost_replicas_per_request"
"""The setting that such an error names; Anthropic's errors have no codes."""
_ENDS = {"message_stop", "response.completed", "response.incomplete"}
"""Events that end a stream of Anthropic's API and of Responses."""
_DEFECTS = {"server_error", "api_error"}
_STATUSES = {400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 429, 431, 500, 503, 504}
_SETTING = re.compile(r"\b(\w+(?:\[\])?)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def fault(answer: Answer) -> str | None:
    """Return what is wrong with an answer, None when nothing is."""
    if answer.status >= 400:
        return _error_fault(answer)
    if answer.status not in (200, 202):
        return f"status {answer.status}"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _stream_fault(answer.body)
    if answer.headers.get("content-type", "") == "application/json":
        return None if isinstance(_json(answer.body), dict) else f"no JSON object: {answer.body[:200]!r}"
    return None


def _error_fault(answer: Answer) -> str | None:
    told = _json(answer.body)
    shown = f"{answer.status} {answer.body[:300]!r}"
    error = _error_in(told)
    if error is None or set(error) != _ERROR_KEYS:
        return f"no error object: {shown}"
    if answer.status not in _STATUSES:
        return f"a status that docs/api.md does not have: {shown}"
    if answer.status == 500 and error["code"] not in _MEANT_500:
        return f"a defect: {shown}"
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return f"no retry-after: {shown}"
    if answer.status in _OF_BOUNDS and not _names_a_setting(error["message"]):
        return f"names no setting: {shown}"
    return _message_fault(error["message"], shown)


def _message_fault(message: object, shown: str) -> str | None:
    is_sentence = isinstance(message, str) and len(message) > 10 and message.endswith((".", "?"))
    return None if is_sentence else f"the message is no sentence: {shown}"


def _stream_fault(body: bytes) -> str | None:
    """Every event is JSON; the last one is [DONE], another API's end, or an error."""
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events:
        return "a stream without events"
    for event in events[:-1]:
        if not isinstance(_json(event), dict):
            return f"an event is no JSON: {event[:200]!r}"
    if events[-1] == b"[DONE]":
        return None
    last = _json(events[-1])
    kind = last.get("type") if isinstance(last, dict) else None
    if kind in _ENDS:
        return None
    error = _error_in(last)
    if kind == "response.failed" and len(events) > 1:  # the event before says why
        told = _json(events[-2])
        error = {**told, "type": told.get("code")} if told.get("type") == "error" else None
    if error is None:
        return f"a stream ends with {events[-1][:200]!r}"
    if error["type"] in _DEFECTS and error["code"] not in _MEANT_500:
        return f"a stream ends with a defect: {error}"
    return _message_fault(error["message"], str(error))


def _error_in(told: Any) -> dict[str, Any] | None:
    """Return the error in a body or event with the fields of OpenAI's errors; None if there is none."""
    error = told.get("error") if isinstance(told, dict) else None
    if not isinstance(error, dict):
        return None
    if set(told) == {"type", "error", "request_id"} and set(error) == {"type", "message"}:  # Anthropic's
        is_meant = _MEANT_SETTING in str(error["message"])
        return {**error, "param": None, "code": "ends_engines" if is_meant else None}
    return error


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _names_a_setting(message: str) -> bool:
    return any(name in _SETTINGS.get(section, ()) for section, name in _SETTING.findall(message))


def _settings() -> dict[str, set[str]]:
    """Return the names of all settings, by their section."""
    found = {"engine": {field.name for field in dataclasses.fields(EngineConfig)}}
    found["tenants[]"] = set(TenantSettings.model_fields)
    for name, field in AppArgs.model_fields.items():
        fields = getattr(field.annotation, "model_fields", None)
        if fields is not None:
            found[name] = set(fields)
    return found


_SETTINGS = _settings()
