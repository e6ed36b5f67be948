"""The settings of KV events: endpoints that cannot work are refused before anything starts, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.kv_events import KvEventSettings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"endpoint": "5557"}, r"not an address to listen on: give tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1"}, "not an address to listen on"),
        ({"endpoint": "tcp://127.0.0.1:0"}, "not an address to listen on"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "not an address to listen on"),
        ({"endpoint": "inproc://events"}, "not an address to listen on"),
        ({"endpoint": "ipc:///tmp/events"}, r"the same file for every replica: put \{replica\}"),
        ({"replay_endpoint": "udp://127.0.0.1:5558"}, "replay_endpoint"),
        ({"endpoint": "tcp://*:65530"}, "endpoint leaves 6 ports: choose a lower port"),
        ({"replay_endpoint": "tcp://127.0.0.1:5558"}, r"are 1 ports apart.*port 5574, or lower num_ports"),
        ({"topic": "kv@{pod}"}, r"unknown placeholders \['pod'\]: use replica, host or model"),
        ({"encoding": "json"}, "encoding"),
        ({"num_ports": 0}, "num_ports"),
        ({"hwm": 0}, "hwm"),
        ({"port": 1}, "port"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        AppArgs.model_validate({"engines": {"kv_events": settings}})


def test_settings_that_can_work_are_accepted() -> None:
    for settings in (
        {},
        {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"},
        {"endpoint": "tcp://[::1]:5557", "replay_endpoint": "tcp://[::1]:5558", "num_ports": 1},
        {"endpoint": "ipc:///tmp/{replica}", "topic": "kv@{host}@{model}", "encoding": "map"},
    ):
        assert KvEventSettings.model_validate(settings)


def test_kv_events_are_off_by_default() -> None:
    assert AppArgs().engines.kv_events is None


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    args = {"engine": {"prefix_cache": False}, "engines": {"kv_events": {}}}
    with pytest.raises(ValidationError, match=r"engine\.prefix_cache: false turns off"):
        AppArgs.model_validate(args).served  # noqa: B018
