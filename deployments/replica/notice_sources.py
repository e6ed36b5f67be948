"""Where the end of a machine is announced: a file, an HTTP endpoint, or the metadata service of a cloud.

file     appears: its machine or pod ends; empty, or with the object of AWS
URL      404 or 204: no notice; 200: the object of AWS
aws      spot/instance-action, with a session's token: 404, or {"action": "terminate", "time": "..."}
gcp      instance/preempted: TRUE; instance/maintenance-event: TERMINATE_ON_HOST_MAINTENANCE
azure    scheduledevents: {"Events": [{"EventType": "Preempt", "Resources": ["vm"], "NotBefore": "..."}]}

An answer of any other form is `Unreadable`, never a notice.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

SourceName = Literal["file", "url", "aws", "gcp", "azure"]
METADATA = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
"""The metadata service of each cloud, which only its own machines reach."""
MAX_ANSWER_BYTES = 2**18
_MAX_FILE_BYTES = 2**16
_TOKEN_S = "21600"
"""Seconds for which AWS accepts a token: the most that it offers."""
_ENDING = ("terminate", "stop", "hibernate")
"""Actions of AWS. All of them end the process or suspend it for long."""
_AZURE_ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events of Azure that end the machine's processes; during a Freeze they only pause for some seconds."""


class Unreadable(Exception):
    """A source gave no answer of its form; the message says what was wrong."""


@dataclass(frozen=True, slots=True)
class Notice:
    """The announcement that this machine, or pod, ends."""

    reason: str
    """Its kind, for the log."""
    ends_at: float | None = None
    """Unix time of the end; None: as long after the notice as `drain.grace_s`."""


Look = Callable[[float], Notice | None]
"""Returns the present notice, or None; waits at most so many seconds for each answer. Raises Unreadable."""


def source_of(notice: str, metadata: Mapping[str, str] = METADATA) -> tuple[SourceName, Look]:
    """Return the source that the setting `drain.notice` names; `metadata` is where each cloud's service is."""
    if notice == "aws":
        return "aws", _Aws(metadata["aws"]).look
    if notice == "gcp":
        return "gcp", lambda timeout_s: _gcp(metadata["gcp"], timeout_s)
    if notice == "azure":
        return "azure", _Azure(metadata["azure"]).look
    if urlsplit(notice).scheme in ("http", "https"):
        return "url", lambda timeout_s: _url(notice, timeout_s)
    return "file", _File(Path(notice)).look


class _File:
    """A file that appears. One from before this process is of an earlier container in the same pod."""

    def __init__(self, path: Path) -> None:
        self._path, self._before = path, _modified_at(path)

    def look(self, timeout_s: float) -> Notice | None:
        """Return the notice in the file; None while there is none. Raises Unreadable."""
        modified_at = _modified_at(self._path)
        if modified_at is None or modified_at == self._before:
            return None
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise Unreadable(f"{self._path} cannot be read: {error.strerror}") from None
        if not content.strip():
            return Notice("a file")
        return _aws_action(content, str(self._path))


def _modified_at(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _url(url: str, timeout_s: float) -> Notice | None:
    status, body = _request("GET", url, {}, timeout_s)
    if status in (404, 204):
        return None
    return _aws_action(_expect_200(status, body, url), url)


class _Aws:
    """The metadata service of AWS, which answers only with a token that it has given out (IMDSv2)."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._token: str | None = None

    def look(self, timeout_s: float) -> Notice | None:
        """Return the notice of an interruption; None while there is none. Raises Unreadable."""
        url = f"{self._base}/latest/meta-data/spot/instance-action"
        had_token = self._token is not None
        status, body = self._get(url, timeout_s)
        if status == 401:
            self._token = None
            if had_token:  # It has expired.
                status, body = self._get(url, timeout_s)
        return None if status == 404 else _aws_action(_expect_200(status, body, url), url)

    def _get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        if self._token is None:
            where, lifetime = f"{self._base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_S}
            self._token = _line(_expect_200(*_request("PUT", where, lifetime, timeout_s), where), where)
        return _request("GET", url, {"X-aws-ec2-metadata-token": self._token}, timeout_s)


def _aws_action(content: bytes, where: str) -> Notice:
    found = _object(content, where)
    action, at = found.get("action"), found.get("time")
    if action not in _ENDING or not isinstance(at, str):
        raise Unreadable(f'{where} has no "action" of {", ".join(_ENDING)} with a "time": {content[:80]!r}')
    try:
        ends = datetime.fromisoformat(at)
    except ValueError:
        raise Unreadable(f'{where}: "time" is not like 2026-01-31T08:22:00Z: {at[:40]!r}') from None
    return Notice(str(action), (ends if ends.tzinfo else ends.replace(tzinfo=UTC)).timestamp())


def _gcp(base: str, timeout_s: float) -> Notice | None:
    for name, values, ending in (
        ("preempted", ("FALSE", "TRUE"), "TRUE"),
        (
            "maintenance-event",
            ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
            "TERMINATE_ON_HOST_MAINTENANCE",
        ),
    ):
        url = f"{base}/computeMetadata/v1/instance/{name}"
        answer = _line(_expect_200(*_request("GET", url, {"Metadata-Flavor": "Google"}, timeout_s), url), url)
        if answer not in values:
            raise Unreadable(f"{url} is none of {', '.join(values)}: {answer[:80]!r}")
        if answer == ending:
            return Notice(name if answer == "TRUE" else answer)
    return None


class _Azure:
    """Azure's scheduled events, which name the machines of a whole group that they are for."""

    def __init__(self, base: str) -> None:
        self._base = f"{base}/metadata"
        self._machine: str | None = None

    def look(self, timeout_s: float) -> Notice | None:
        """Return the first event that ends this machine; None if there is none. Raises Unreadable."""
        if self._machine is None:
            self._machine = _line(self._get("instance/compute/name?api-version=2020-09-01&format=text", timeout_s))
        path = "scheduledevents?api-version=2020-07-01"
        events = _object(self._get(path, timeout_s), path).get("Events")
        if not isinstance(events, list):
            raise Unreadable(f"{path} has no list of Events")
        notices = [_azure_notice(event, path) for event in events if _is_for(self._machine, event)]
        ending = [notice for notice in notices if notice is not None]
        return min(ending, key=lambda notice: notice.ends_at or time.time(), default=None)

    def _get(self, path: str, timeout_s: float) -> bytes:
        url = f"{self._base}/{path}"
        return _expect_200(*_request("GET", url, {"Metadata": "true"}, timeout_s), url)


def _is_for(machine: str, event: Any) -> bool:
    """Whether an event is for a machine. Names of machines are compared without their case."""
    if not isinstance(event, dict) or not isinstance(event.get("Resources"), list):
        raise Unreadable(f"an event has no list of Resources: {str(event)[:80]}")
    return machine.lower() in [str(name).lower() for name in event["Resources"]]


def _azure_notice(event: Mapping[str, Any], where: str) -> Notice | None:
    kind, begins = event.get("EventType"), event.get("NotBefore")
    if kind not in _AZURE_ENDING:
        return None
    if not begins:  # It has started.
        return Notice(str(kind))
    try:
        return Notice(str(kind), parsedate_to_datetime(begins).timestamp())
    except (TypeError, ValueError):
        raise Unreadable(f'{where}: "NotBefore" is not a date: {str(begins)[:40]!r}') from None


# --- HTTP -----------------------------------------------------------------------------------------------------


def _request(method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
    """Return the status and the content. Uses no proxy, which would ask its own machine's service, and follows no
    redirect. Raises Unreadable without a whole answer in `timeout_s`.
    """
    parts, deadline = urlsplit(url), time.monotonic() + timeout_s
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    content = b""
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        while part := response.read1(MAX_ANSWER_BYTES):
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise Unreadable(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > deadline:
                raise Unreadable(f"{url} has not answered within {timeout_s:g} s")
        return response.status, content
    except (OSError, http.client.HTTPException) as error:
        raise Unreadable(f"{url} does not answer: {error!r}") from None
    finally:
        connection.close()


def _expect_200(status: int, content: bytes, where: str) -> bytes:
    if status != 200:
        raise Unreadable(f"{where} answers with status {status}")
    return content


def _line(content: bytes, where: str = "the metadata service") -> str:
    """Return an answer of one line."""
    try:
        line = content.decode("ascii").strip()
    except UnicodeDecodeError:
        line = ""
    if not line or not line.isprintable():
        raise Unreadable(f"{where} answers with no line of text: {content[:80]!r}")
    return line


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreadable(f"{where} is not a JSON object: {content[:80]!r}")
    return found
