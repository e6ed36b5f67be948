"""A request that is cancelled at any turn of the event loop leaves nothing behind, whatever was done by then."""

from __future__ import annotations

import asyncio

import pytest

from deployments.api import TextCodec
from tests.deployments.support.turns import turns
from tests.deployments.support.virtual_time import run
from tests.deployments.support.watched_api import ASKS, WAIT, Leaving, WatchedApi, WatchedClient, left_running

LEAVINGS: tuple[Leaving, ...] = ("server", "asgi", "connection")
AGAIN = (None, 1, 2)


@pytest.mark.parametrize(
    ("leaving", "num_more", "number"),
    [(leaving, more, i + j) for i, leaving in enumerate(LEAVINGS) for j, more in enumerate(AGAIN)],
)
def test_a_request_cancelled_at_any_turn_leaves_nothing_behind(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch, leaving: Leaving, num_more: int | None, number: int
) -> None:
    """Some requests are cancelled twice: the client leaves, and while the request ends the server stops.

    Each endpoint is asked with all pairs of what a request may be, and the four of them together with every way to
    leave, be stopped, stream and ask for choices.
    """

    async def scenario() -> None:
        api = WatchedApi(codec, monkeypatch)
        for shift, (path, body) in enumerate(ASKS):
            stream, n = bool((number + shift) & 2), (1, 3)[(number + shift) & 1]
            waits = (LEAVINGS.index(leaving) + number + shift // 2 + stream) % 2 == 1
            asked = body | {"stream": stream, "n": n}
            turn, has_ended = 0, False
            while not has_ended:
                turn += 1
                api.load.num_checks = WAIT if waits else 0
                has_ended = await _cancelled(api, path, asked, leaving, turn, num_more)
                left = api.left() | left_running()
                assert not left, f"{path} {asked} {waits=} cancelled at turn {turn}, again after {num_more}"
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
