"""Honest clients of the siege: greedy streams, each compared token by token with its answer in peace.

in_peace:  send every ask once, not streamed ──▶ the tokens and the text of its answer
honest:    a client with one ask after another, streamed; every chunk must continue the known answer
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.event_lines import EventLines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SUBJECTS = ("itertools.chain", "os.path.join", "json.dumps", "re.sub", "random.shuffle", "heapq.merge")
_SYSTEM = "You answer questions on the standard library, briefly and with an example. " * 3
RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class Ask:
    """A greedy request and what it answers."""

    name: str
    path: str
    body: Mapping[str, Any]
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(slots=True)
class Broken:
    """A stream whose connection broke off, between two times of `time.monotonic()`."""

    name: str
    began: float
    ended: float
    error: str


@dataclass(slots=True)
class Tally:
    """What became of the honest streams."""

    num_whole: int = 0
    num_tokens: int = 0
    longest_pause_s: float = 0.0
    """Longest time between two chunks of a stream."""
    broken: list[Broken] = field(default_factory=list)
    """Connections that broke off, whose streams were continued. Only an ingress that died may be the cause."""
    wrong: list[str] = field(default_factory=list)
    """Streams with another token than in peace, with an error, or with no proper end."""


class Wrong(Exception):
    """A stream is not what it must be."""


def make_asks(count: int, seed: int) -> list[Ask]:
    """Make chats and completions in turn, of 40 to 160 tokens, of which chats share a long beginning."""
    draw = random.Random(f"{seed} asks")
    asks = []
    for number in range(count):
        question = f"What does {draw.choice(_SUBJECTS)} do? ({number})"
        body: dict[str, Any] = {
            "model": "demo",
            "temperature": 0,
            "max_tokens": draw.randint(40, 160),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if number % 2:
            asks.append(Ask(f"completion {number}", COMPLETIONS, {**body, "prompt": question}))
        else:
            messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
            asks.append(Ask(f"chat {number}", CHAT, {**body, "messages": messages}))
    return asks


async def in_peace(client: httpx.AsyncClient, asks: Sequence[Ask]) -> list[Ask]:
    """Return the asks with their answers. Raises RuntimeError when one has none."""
    known = []
    for ask in asks:
        response = await client.post(ask.path, json=dict(ask.body))
        if response.status_code != 200:
            raise RuntimeError(f"{ask.name} has no answer even in peace: {response.text}")
        choice = response.json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        known.append(Ask(ask.name, ask.path, ask.body, tuple(choice["token_ids"]), text))
    return known


async def honest(
    client: httpx.AsyncClient, asks: Sequence[Ask], tally: Tally, draw: random.Random, is_over: Callable[[], bool]
) -> None:
    """Stream one ask after another; one whose connection broke off is continued. At least one is whole."""
    num_whole = 0
    while num_whole == 0 or not is_over():
        reader = Reader(draw.choice(asks))
        while not await _streamed(client, reader, tally):
            await asyncio.sleep(RETRY_S)
        num_whole += 1


async def _streamed(client: httpx.AsyncClient, reader: Reader, tally: Tally) -> bool:
    """Stream an ask, or the rest of it; return whether it came to an end, right or wrong."""
    began, ask = time.monotonic(), reader.ask
    reader.lines.begin()
    try:
        body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"accept": "text/event-stream", **reader.lines.headers}
        async with client.stream("POST", ask.path, json=body, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise Wrong(f"answered with {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                reader.take(line)
        reader.check_end()
    except httpx.HTTPError as error:
        tally.broken.append(Broken(ask.name, began, time.monotonic(), f"{type(error).__name__}: {error}"))
        return False
    except Wrong as what:
        tally.wrong.append(f"{ask.name}: {what}")
        return True
    tally.num_whole += 1
    tally.num_tokens += len(ask.token_ids)
    tally.longest_pause_s = max(tally.longest_pause_s, reader.longest_pause_s)
    return True


class Reader:
    """Compares a stream with the known answer, chunk by chunk."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.lines = EventLines()
        self._num_tokens = 0
        self._text = ""
        self._num_used: int | None = None
        self._is_done = False
        self._last_at: float | None = None
        self.longest_pause_s = 0.0

    def take(self, line: str) -> None:
        """Take a line of the event stream. Raises Wrong."""
        data = self.lines.take(line).get("data")
        if data is None:
            return
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - (self._last_at or now))
        self._last_at = now
        if self._is_done:
            raise Wrong(f"goes on after its end: {data[:100]}")
        if data == "[DONE]":
            self._is_done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise Wrong(f"ended after {self._num_tokens} tokens with {chunk['error']}")
        if chunk.get("usage"):
            self._num_used = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self._take_choice(choice)

    def check_end(self) -> None:
        """Raise Wrong unless the stream was whole, or httpx.ReadError if it just ended."""
        wanted = len(self.ask.token_ids)
        if not self._is_done:
            raise httpx.ReadError(f"the stream ended after {self._num_tokens} of {wanted} tokens without [DONE]")
        if (self._num_tokens, self._num_used, self._text) != (wanted, wanted, self.ask.text):
            raise Wrong(
                f"has {self._num_tokens} tokens, {self._num_used} by its usage, and in peace {wanted}; its text "
                f"{'is' if self._text == self.ask.text else 'differs from'} that in peace"
            )

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if "prompt_token_ids" in choice:
            return
        token_ids = tuple(choice.get("token_ids", ()))
        known = self.ask.token_ids[self._num_tokens : self._num_tokens + len(token_ids)]
        if token_ids != known:
            raise Wrong(f"from token {self._num_tokens} on has {token_ids}, and in peace {known}")
        self._num_tokens += len(token_ids)
        self._text += said
        if not self.ask.text.startswith(self._text):
            raise Wrong(f"has the text {self._text[-40:]!r} after {self._num_tokens} tokens")
