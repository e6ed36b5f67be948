"""No request stops the event loop: for every endpoint and field at the largest body, each turn is short.

A turn is measured in processor time of the loop's own thread, which other processes do not change, and may take
several times what it does on an idle machine. What threads do is bounded by the size of their single calls.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import ASGIApp

from benchmarks import loop_gap_cases
from benchmarks.loop_gap_cases import Case, cases, large_answers
from benchmarks.loop_gaps import Watch, application, post
from deployments.api import Limits
from deployments.api.generation import exchange
from deployments.api.http.parts import PART_BYTES
from deployments.api.http.transport import json_in_pieces

MOST_S = 0.15
"""Three times what docs/security.md promises, for slow machines."""
BODY_BYTES = Limits().max_body_bytes


@pytest.fixture(scope="module")
def app() -> ASGIApp:
    """The API in a process that, as an ingress's, does not collect what its start has left."""
    made = application(Limits(), context=131_072)
    gc.collect()
    gc.freeze()
    return made


NAMED = {
    "reasoning: words",
    "id of a call: words",
    "arguments: lists",
    "prompt: prompts of one id",
    "4,096 messages",
    "6 prompts of 65,000 ids, echoed",
    "6 prompts of 65,000 ids, echoed with ids, n=8",
    "tools",
    "calls",
    "parts",
    "60 messages of 100 calls",
    "logit_bias",
    "stop",
    "schema: lists",
    "tokens: ids",
    "structured_outputs.choice",
    "128 tools of 60 kB, strict",
    "content: words",
    "prompt: ids",
    "unknown field: objects",
    "not JSON: brackets",
    "almost JSON",
    "prompt: commas",
    "131,000 tokens",
    "3 prompts of 131,000 ids, echoed",
    "3 prompts of 131,000 special ids, n=16",
    "64 prompts, 16 answers each",
    "parameters: lists",
    "messages of blocks",
    "2,000 messages of blocks",
    "blocks",
    "content of a result",
    "input: lists",
    "4,096 items: messages",
    "4,096 items: calls",
    "500 items: messages",
    "items: references",
    "4,096 items: references",
    "parts of an item",
    "metadata: words",
    "flat tools",
    "schema of a text: lists",
    "parameters of a flat tool: lists",
    "an answer with log-probabilities, whole",
    "an answer with log-probabilities, streamed",
    "1,024 embeddings, float",
    "1,024 embeddings, base64",
}
"""Bodies by which some version stopped the loop, and one of each kind."""


def slowest() -> Iterator[Case]:
    for case in cases(BODY_BYTES):
        if case.name in NAMED and not (case.path == "/tokenize" and case.name.startswith("prompt")):
            yield case


def test_no_turn_of_the_loop_is_long(app: ASGIApp) -> None:
    too_long = {}

    async def main() -> None:
        for case in slowest():
            assert case.body  # it is made now, and not while the event loop is watched
            async with Watch() as watch:
                await post(app, case)
            if watch.own_s > MOST_S:
                too_long[f"{case.path} {case.name}"] = round(watch.own_s, 3)

    asyncio.run(main())
    assert too_long == {}


MOST_PIECE = 2**20
"""Bytes that a thread encodes in one step at most. No other goes on meanwhile, for some milliseconds."""


def test_a_large_answer_is_made_and_sent_in_pieces(app: ASGIApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never put together, which would be a step of the interpreter as long as the answer."""
    largest: list[int] = []

    def noted(pieces: Sequence[bytes], *options: Any) -> Response:
        largest.append(max(map(len, pieces)))
        return json_in_pieces(pieces, *options)

    monkeypatch.setattr(loop_gap_cases, "LONG_ANSWER", 12_000)
    monkeypatch.setattr(exchange, "json_in_pieces", noted)

    async def main() -> None:
        for case in large_answers():
            status, sent = await post(app, case)
            assert status == 200 and sum(map(len, sent)) > MOST_PIECE
            assert max(map(len, sent)) <= PART_BYTES, case

    asyncio.run(main())
    assert len(largest) == 5 and max(largest) <= MOST_PIECE
