"""A defect in any step of an answer reaches the client as an error at once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from deployments.admission.rate_limits import Ticket
from deployments.api import TextCodec
from deployments.api.http.pacing import Turns
from deployments.api.output.choices import Choices
from tests.deployments.support.answer_calls import CALLED, OPENING
from tests.deployments.support.faults import Faults, When
from tests.deployments.support.scripted_api import ScriptedGeneration
from tests.deployments.support.virtual_time import now, run
from tests.deployments.support.watched_api import ASKS, WAIT, WatchedApi, WatchedClient, left_running

GIVING_BACK = [
    (Ticket, "refuse close"),
    (Turns, "close"),
    (Choices, "aclose"),
    (ScriptedGeneration, "aclose"),
]
"""What gives something back, which is kept if the function fails before."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_a_defect_in_any_step_reaches_the_client_immediately_and_leaves_nothing(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int, when: When
) -> None:
    """Each call in turn fails of all that the answer to a request makes which waits for an engine.

    Each endpoint is asked in two of the eight ways, which differ in everything.
    """
    faults = Faults(monkeypatch, when, *CALLED, *(GIVING_BACK if when == "after" else OPENING))
    path, body = ASKS[2 * (stream ^ (n == 2)) + (stream ^ (when == "after"))]

    async def scenario() -> None:
        api = WatchedApi(codec, monkeypatch)
        number = 0
        while number == 0 or faults.failed is not None:
            number += 1
            api.load.num_checks = WAIT
            faults.arm(number)
            client = WatchedClient(api.app, path, body | {"stream": stream, "n": n})
            began = now()
            await asyncio.wait([client.task])
            faults.disarm()
            assert now() - began < 2, faults.failed
            _check_answer(client, faults.failed, ENDS[path], is_stream=stream)
            await asyncio.sleep(3600)  # tasks that were cancelled end, and timers that are still set fire
            left = api.left() | left_running()
            assert not left.keys() - _COUNTED, faults.failed
        assert number > 30

    run(scenario())


ENDS = {
    "/v1/chat/completions": ("[DONE]", "choices", "server_error"),
    "/v1/completions": ("[DONE]", "choices", "server_error"),
    "/v1/messages": ('{"type":"message_stop"}', "content", "api_error"),
    "/v1/responses": ('{"type":"response.completed"', "output", "server_error"),
}
"""How a stream ends, the field of a whole answer with what was said, and the type of the error for a defect."""


def _check_answer(
    client: WatchedClient, failed: str | None, ends: tuple[str, str, str], *, is_stream: bool
) -> None:
    """Check that an answer is whole, or says that it is not."""
    end, field, error_type = ends
    assert client.task.exception() is None and client.status in ((200, 500, 503) if failed else (200,)), failed
    if client.status != 200:
        assert json.loads(client.sent)["error"], failed
    elif is_stream:
        last = client.sent.decode().split("data: ")[-1]
        assert last.startswith(end) or _error_type(json.loads(last)) == error_type, failed
    else:
        assert json.loads(client.sent)[field], failed


def _error_type(event: dict[str, Any]) -> str:
    """Return the type of the error in a stream's last event, or its code in a response that failed."""
    error = event["response"]["error"] if "response" in event else event["error"]
    return str(error.get("type") or error["code"])


_COUNTED = {"accepted, not ended"}
"""What only metrics say: when these fail, they are wrong."""
