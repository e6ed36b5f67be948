"""A replica notices that its machine ends, from what each cloud announces; whatever else it hears is no notice."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from deployments.config.settings import DrainSettings
from deployments.replica.notice_sources import MAX_ANSWER_BYTES
from deployments.replica.notices import NoticeWatcher
from tests.deployments.support.metadata_server import (
    AWS,
    AZURE,
    AZURE_NAME,
    MAINTENANCE,
    PREEMPTED,
    MetadataServer,
    metadata_server,
)
from tests.support.waiting import wait_until

NOTICED_IN_S = 120.0
OTHER = "/notice"
SOURCES = {"aws": AWS, "gcp": PREEMPTED, "azure": AZURE, "url": OTHER}


def in_120_s() -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=NOTICED_IN_S)


def aws(action: str = "terminate", at: str | None = None) -> bytes:
    return json.dumps({"action": action, "time": at or in_120_s().strftime("%Y-%m-%dT%H:%M:%SZ")}).encode()


def azure(kind: str = "Preempt", machines: tuple[str, ...] = ("vm-2", "VM-3"), **fields: Any) -> bytes:
    event = {
        "EventId": "f020ba2e", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(machines),
        "EventStatus": "Scheduled", "NotBefore": format_datetime(in_120_s(), usegmt=True), **fields,
    }  # fmt: skip
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]}).encode()


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with metadata_server() as running:
        running.answers[AZURE] = b'{"DocumentIncarnation": 0, "Events": []}'
        yield running


@contextmanager
def watching(server: MetadataServer | None, notice: str | None, **settings: Any) -> Iterator[NoticeWatcher]:
    notice = f"{server.url}{OTHER}" if notice == "url" and server is not None else notice
    drain = DrainSettings(**{"notice": notice, "poll_s": 0.1, "grace_s": 30.0, **settings})
    watcher = NoticeWatcher(drain, "r0", None if server is None else server.clouds)
    watcher.start()
    try:
        yield watcher
    finally:
        watcher.close()


def looked(server: MetadataServer, times: int = 2) -> None:
    """Wait until it has looked several times more."""
    before = server.num_asked
    wait_until(lambda: server.num_asked >= before + times)


NOTICES: list[tuple[str, str, Callable[[], bytes], float, str]] = [
    ("aws", AWS, aws, NOTICED_IN_S, "terminate"),
    ("aws", AWS, lambda: aws("hibernate"), NOTICED_IN_S, "hibernate"),
    ("url", OTHER, lambda: aws("stop", in_120_s().isoformat()), NOTICED_IN_S, "stop"),
    ("gcp", PREEMPTED, lambda: b"TRUE", 30.0, "preempted"),
    ("gcp", MAINTENANCE, lambda: b"TERMINATE_ON_HOST_MAINTENANCE\n", 30.0, "TERMINATE_ON_HOST_MAINTENANCE"),
    ("azure", AZURE, azure, NOTICED_IN_S, "Preempt"),
    ("azure", AZURE, lambda: azure("Terminate"), NOTICED_IN_S, "Terminate"),
    ("azure", AZURE, lambda: azure("Reboot", EventStatus="Started", NotBefore=""), 30.0, "Reboot"),
]


@pytest.mark.parametrize(("source", "path", "answer", "left_s", "reason"), NOTICES)
def test_a_notice_of_each_cloud_says_how_long_is_left_and_may_be_withdrawn(
    server: MetadataServer, caplog: pytest.LogCaptureFixture, source: str, path: str,
    answer: Callable[[], bytes], left_s: float, reason: str,
) -> None:  # fmt: skip
    before = server.answers.get(path, 404)
    with caplog.at_level(logging.INFO, "ray.serve"), watching(server, source) as watcher:
        looked(server)
        assert not watcher.is_leaving and watcher.seconds_left is None
        server.answers[path] = answer()
        wait_until(lambda: watcher.is_leaving)
        assert watcher.seconds_left == pytest.approx(left_s, abs=5.0)
        looked(server)
        assert watcher.counts == {source: 1}
        server.answers[path] = before
        wait_until(lambda: not watcher.is_leaving)
        assert watcher.seconds_left is None
    ends, stays = caplog.messages
    assert ends.startswith("the machine of r0 ends in") and ends.endswith(f"s ({source}: {reason})")
    assert stays == "r0 stays: its notice was withdrawn"


UNREADABLE: list[tuple[str, str, bytes | int, str]] = [
    *((source, path, 500, "status 500") for source, path in SOURCES.items()),
    ("aws", AWS, b"<html>Log in to this network</html>", "not a JSON object"),
    ("aws", AWS, b'{"action": "terminate"}', '"time"'),
    ("aws", AWS, b'{"action": "terminate", "time": "soon"}', "2026-01-31T08:22:00Z"),
    ("aws", AWS, b'{"action": "rename", "time": "2026-01-31T08:22:00Z"}', '"action"'),
    ("url", OTHER, b"", "not a JSON object"),
    ("url", OTHER, b"[" * 100_000, "not a JSON object"),
    ("url", OTHER, b" " * (MAX_ANSWER_BYTES + 1), "more than"),
    ("gcp", PREEMPTED, b"MAYBE", "none of FALSE, TRUE"),
    ("gcp", PREEMPTED, b"\xff\xfe", "no line of text"),
    ("gcp", MAINTENANCE, 404, "status 404"),
    ("azure", AZURE, b'{"Events": {}}', "no list of Events"),
    ("azure", AZURE, b'{"Events": [{"EventType": "Preempt"}]}', "no list of Resources"),
    ("azure", AZURE, azure(NotBefore="tomorrow"), "not a date"),
    ("azure", AZURE_NAME, b"", "no line of text"),
]


@pytest.mark.parametrize(("source", "path", "answer", "says"), UNREADABLE)
def test_an_unreadable_answer_is_one_warning_and_no_notice(
    server: MetadataServer,
    caplog: pytest.LogCaptureFixture,
    source: str,
    path: str,
    answer: bytes | int,
    says: str,
) -> None:
    server.answers[path] = answer
    with caplog.at_level(logging.INFO, "ray.serve"), watching(server, source) as watcher:
        looked(server, 4)
        assert not watcher.is_leaving and not watcher.counts
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message.startswith("drain.notice: ") and says in warning.message


def test_what_cannot_be_read_leaves_a_notice_as_it_was_and_is_named_again_after_it_could(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers[AWS] = aws()
    with caplog.at_level(logging.INFO, "ray.serve"), watching(server, "aws") as watcher:
        wait_until(lambda: watcher.is_leaving)
        for _ in range(2):
            server.answers[AWS] = 503
            looked(server)
            assert watcher.is_leaving
            server.answers[AWS] = aws()
            looked(server)
        assert watcher.counts == {"aws": 1}
    assert [message.split(": ", 1)[0] for message in caplog.messages[1:]] == ["drain.notice"] * 4
    assert sum("cannot be read" in message for message in caplog.messages) == 2


def test_a_token_that_has_expired_is_renewed_without_a_warning(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    with watching(server, "aws") as watcher:
        looked(server)
        server.token = "token-2"
        looked(server)
        server.answers[AWS] = aws()
        wait_until(lambda: watcher.is_leaving)
    assert len(caplog.messages) == 1


def test_a_service_that_answers_slowly_or_not_at_all_is_unreadable(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.is_slow.set()
    with watching(server, "gcp") as watcher:
        wait_until(lambda: len(caplog.messages) == 1)
        assert "has not answered within 2 s" in caplog.messages[0] and not watcher.is_leaving
        server.is_slow.clear()
        server.answers[PREEMPTED] = b"TRUE"
        wait_until(lambda: watcher.is_leaving)
    caplog.clear()
    with watching(None, "http://127.0.0.1:1/nothing-listens-here") as watcher:
        wait_until(lambda: len(caplog.messages) == 1)
        assert "does not answer" in caplog.messages[0] and not watcher.is_leaving


@pytest.mark.parametrize("event", [azure("Freeze"), azure(machines=("vm-2", "vm-30"))])
def test_events_that_only_pause_this_machine_or_are_for_others_are_no_notices(
    server: MetadataServer, caplog: pytest.LogCaptureFixture, event: bytes
) -> None:
    server.answers[AZURE] = event
    server.answers[MAINTENANCE] = b"MIGRATE_ON_HOST_MAINTENANCE"
    with watching(server, "azure") as watcher, watching(server, "gcp") as other:
        looked(server, 6)
        assert not watcher.is_leaving and not other.is_leaving
    assert not caplog.messages


def test_a_file_is_a_notice_from_when_it_appears(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "notice"
    path.touch()
    with watching(None, str(path), grace_s=45.0) as watcher:
        time.sleep(0.3)
        assert not watcher.is_leaving  # It is an earlier container's.
        path.unlink()
        time.sleep(0.3)
        path.touch()
        wait_until(lambda: watcher.is_leaving)
        assert watcher.seconds_left == pytest.approx(45.0, abs=5.0)
        path.write_bytes(aws())
        wait_until(lambda: (watcher.seconds_left or 0.0) > 60.0)
        path.write_bytes(b"?")
        wait_until(lambda: len(caplog.messages) == 2)
        assert "not a JSON object" in caplog.messages[1] and watcher.counts == {"file": 1}
        path.unlink()
        wait_until(lambda: not watcher.is_leaving)


def test_a_replica_serves_until_the_end_is_near(server: MetadataServer) -> None:
    """Otherwise a maintenance that is announced long before would leave a machine idle."""
    clock = [time.time()]
    server.answers[AWS] = aws()
    watcher = NoticeWatcher(
        DrainSettings(notice="aws", poll_s=0.1, leave_s=60.0), "r0", server.clouds, lambda: clock[0]
    )
    watcher.start()
    try:
        wait_until(lambda: watcher.counts == {"aws": 1})
        assert not watcher.is_leaving and watcher.seconds_left == pytest.approx(NOTICED_IN_S, abs=5.0)
        clock[0] += NOTICED_IN_S - 59.0
        assert watcher.is_leaving and watcher.seconds_left == pytest.approx(59.0, abs=5.0)
        clock[0] += 600.0
        assert watcher.is_leaving and watcher.seconds_left == 0.0
    finally:
        watcher.close()


def test_a_proxy_is_not_asked(server: MetadataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer for its own machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    server.answers[AWS] = aws()
    with watching(server, "aws") as watcher:
        wait_until(lambda: watcher.is_leaving)


def test_without_a_source_there_is_no_notice() -> None:
    with watching(None, None) as watcher:
        assert not watcher.is_leaving and watcher.seconds_left is None and not watcher.counts


@pytest.mark.parametrize("notice", ["relative/path", "AWS", "ftp://host/notice", "http://", ""])
def test_a_source_that_is_none_is_refused(notice: str) -> None:
    with pytest.raises(ValueError, match="notice must be"):
        DrainSettings(notice=notice)
