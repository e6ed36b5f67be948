"""An ingress that has run out of memory or descriptors says so with a 503, at whatever step it happens."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable

import pytest

from deployments.api import TextCodec
from deployments.api.base.errors import unexpected
from tests.deployments.support.answer_calls import CALLED, OPENING
from tests.deployments.support.faults import Faults
from tests.deployments.support.scripted_api import Client
from tests.deployments.support.virtual_time import run
from tests.deployments.support.watched_api import ASKS, WatchedApi, WatchedClient

SHORTAGES: dict[str, Callable[[str], Exception]] = {
    "memory": MemoryError,
    "memory of the kernel": lambda label: OSError(errno.ENOMEM, label),
    "descriptors": lambda label: OSError(errno.EMFILE, label),
    "descriptors of the machine": lambda label: OSError(errno.ENFILE, label),
    "threads": lambda label: RuntimeError("can't start new thread"),
}

CODES = {"memory": "out_of_memory", "descriptors": "too_many_open_files"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shortage", CODES)
def test_a_shortage_in_any_step_is_a_503(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool, shortage: str
) -> None:
    faults = Faults(monkeypatch, "before", *CALLED, *OPENING, error=SHORTAGES[shortage])
    path, body = ASKS[stream ^ (shortage == "memory")]

    async def scenario() -> None:
        api = WatchedApi(codec, monkeypatch)
        statuses, number = set(), 0
        while number == 0 or faults.failed is not None:
            number += 1
            faults.arm(number)
            client = WatchedClient(api.app, path, body | {"stream": stream, "n": 1})
            await asyncio.wait([client.task])
            faults.disarm()
            statuses.add(client.status)
            assert b"server_error" not in client.sent, (faults.failed, client.sent)
            if client.status == 503:
                error = json.loads(client.sent)["error"]
                assert error["code"] == CODES[shortage], faults.failed
        assert statuses == {200, 503} and number > 20

    run(scenario())


@pytest.mark.parametrize("shortage", SHORTAGES)
def test_a_shortage_is_a_503_on_paths_of_the_framework_and_behind_another_error(
    client: Client, monkeypatch: pytest.MonkeyPatch, shortage: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SHORTAGES[shortage]("scripted")

    monkeypatch.setattr(TextCodec, "encode", fail)
    response = client.post("/tokenize", json.dumps({"model": "demo", "prompt": "hi"}).encode())
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    behind = RuntimeError("the delivery failed")
    behind.__cause__ = SHORTAGES[shortage]("scripted")
    assert unexpected(behind, "r").status == 503


@pytest.mark.parametrize("error", [RuntimeError("odd"), OSError(errno.ENOENT, "odd"), KeyError("odd")])
def test_any_other_defect_is_a_500(error: Exception) -> None:
    assert unexpected(error, "r").status == 500
