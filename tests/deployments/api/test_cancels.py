"""A request that is cancelled at any turn of the event loop leaves nothing behind, whatever was done by then."""

from __future__ import annotations

import asyncio

import pytest

from deployments.api import TextCodec
from tests.deployments.support.turns import turns
from tests.deployments.support.virtual_time import run
from tests.deployments.support.watched_api import ASKS, WAIT, Leaving, WatchedApi, WatchedClient, left_running

LEAVINGS: tuple[Leaving, ...] = ("server", "asgi", "connection")


@pytest.mark.parametrize(
    ("leaving", "stream", "n", "waits"),
    [
        (leaving, stream, n, waits)
        for number, leaving in enumerate(LEAVINGS)
        for stream in (True, False)
        for n in (1, 3)
        for waits in [(n == 3) == (stream == number % 2)]  # all pairs of the four
    ],
)
def test_a_request_cancelled_at_any_turn_leaves_nothing_behind(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, leaving: Leaving, stream: bool, n: int, waits: bool
) -> None:
    """Some requests are cancelled twice: the client leaves, and while the request ends the server stops."""

    async def scenario() -> None:
        api = WatchedApi(codec, monkeypatch)
        for path, body in ASKS:
            asked = body | {"stream": stream, "n": n}
            for num_more in (None, 1, 2):
                turn, has_ended = 0, False
                while not has_ended:
                    turn += 1
                    api.load.num_checks = WAIT if waits else 0
                    has_ended = await _cancelled(api, path, asked, leaving, turn, num_more)
                    left = api.left() | left_running()
                    assert not left, f"{path} cancelled at turn {turn}, again after {num_more}"
                assert turn > 10

    run(scenario())


async def _cancelled(
    api: WatchedApi, path: str, asked: dict[str, object], leaving: Leaving, turn: int, num_more: int | None
) -> bool:
    """Send a request, end it at a turn, and perhaps again `num_more` turns later. Return whether it had ended."""
    client = WatchedClient(api.app, path, asked, leaving)
    first = turns().num_turns + turn
    turns().at_turn(first, client.leave)
    if num_more is not None:
        turns().at_turn(first + num_more, client.stop)
    await asyncio.wait([client.task])
    has_ended = not client.has_left.is_set()
    await asyncio.sleep(3600)  # tasks that were cancelled end, and timers that are still set fire
    return has_ended
