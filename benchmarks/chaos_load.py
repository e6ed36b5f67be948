"""Requests whose answers are known: each is asked undisturbed first, and must answer the same whatever happens.

prepare: every ask once, undisturbed ──▶ its Answer
drive:   asks drawn at random, many at once, while faults happen ──▶ Outcome: the same Answer, another, or none
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SUBJECTS = ("itertools.chain", "os.path.join", "json.dumps", "re.sub", "random.shuffle", "heapq.merge")
_NUMBERS = {
    "ignore_eos": False,
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "numbers",
            "schema": {"type": "array", "items": {"enum": [3, 17, 256, 1024]}, "minItems": 40, "maxItems": 60},
        },
    },
}
"""An answer as long as the others that a grammar shapes."""
_SYSTEM = "You answer questions on the standard library, briefly and with an example. " * 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, always the same: greedy or with a seed."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in chunks."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Answer:
    """What must not depend on what happens to replicas; by choice, in order."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    num_tokens: int
    """Generated, of all choices, as `usage` says: a token lost or repeated shows even where it has no text."""
    num_logprobs: int
    """Tokens whose log-probability was told, of all choices."""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are `time.monotonic()`."""

    ask: Ask
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    answer: Answer | None = None
    """None when there is no complete one."""
    error: str | None = None
    """What the service said instead."""
    is_broken_off: bool = False
    """The answer ended without an end, or is not of an ingress: an ingress that lives always ends its answers."""
    chunks: list[float] = field(default_factory=list)
    """When chunks came."""
    replica: str | None = None
    """Engine replica where the first choice began."""

    @property
    def longest_pause(self) -> float:
        """Between two chunks, in seconds."""
        return max((b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)), default=0.0)


def make_asks(count: int, seed: int, tokens: tuple[int, int] = (40, 160)) -> list[Ask]:
    """Chat and completions, greedy and seeded and searched, free and in JSON, one choice and several, by turns."""
    draw = random.Random(seed)
    return [_make(number, draw, draw.randint(*tokens)) for number in range(count)]


def _make(number: int, draw: random.Random, max_tokens: int) -> Ask:
    question = f"What does {draw.choice(_SUBJECTS)} do? ({number})"
    seed = draw.randrange(2**40)
    body: dict[str, Any] = {"model": "demo", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("greedy chat", CHAT, {"messages": messages, "temperature": 0}),
        ("seeded chat, 2 choices", CHAT, {"messages": messages, "n": 2, **drawn}),
        ("seeded completion with stop strings", COMPLETIONS, {"prompt": question, "stop": [], **drawn}),
        ("greedy completion of 2 prompts", COMPLETIONS, {"prompt": [question, question[:9]], "temperature": 0}),
        ("greedy chat with stop strings", CHAT, {"messages": messages, "temperature": 0, "stop": []}),
        ("seeded completion with penalties", COMPLETIONS, {"prompt": question, **drawn, **penalties}),
        ("seeded chat, not streamed", CHAT, {"messages": messages, "stream": False, **drawn}),
        ("seeded completion, 3 choices", COMPLETIONS, {"prompt": question, "n": 3, "top_k": 40, **drawn}),
        ("seeded chat in JSON, 3 choices", CHAT, {"messages": messages, "n": 3, **drawn, **_NUMBERS}),
        ("greedy chat in JSON", CHAT, {"messages": messages, "temperature": 0, **_NUMBERS}),
        ("seeded chat with logprobs", CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 2, **drawn}),
        ("beam search", COMPLETIONS, {"prompt": question, "stream": False, "n": 2, "use_beam_search": True}),
    ]
    name, path, differences = kinds[number % len(kinds)]
    body |= differences
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return Ask(f"{number}: {name}", path, body)


# --- asking -------------------------------------------------------------------------------------------------


async def prepare(client: httpx.AsyncClient, asks: Sequence[Ask], at_once: int) -> list[tuple[Ask, Answer]]:
    """Every ask with its undisturbed answer. Stop strings are taken from what the ask says without them."""
    room = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> tuple[Ask, Answer]:
        async with room:
            answer = await _undisturbed(client, ask)
            if "stop" in ask.body:
                ask = replace(ask, body={**ask.body, "stop": _stops(answer.texts[0])})
                answer = await _undisturbed(client, ask)
            return ask, answer

    return await asyncio.gather(*(one(ask) for ask in asks))


async def _undisturbed(client: httpx.AsyncClient, ask: Ask) -> Answer:
    outcome = await put(client, ask)
    if outcome.answer is None:
        raise RuntimeError(f"{ask.name} has no answer even undisturbed: {outcome.error}")
    return outcome.answer


def _stops(text: str) -> list[str]:
    """Two beginnings of stop strings, which the text holds back for some tokens, and one whole near the end."""
    false_starts = [text[at : at + 10] + "\x01" for at in (len(text) // 3, len(text) // 2)]
    return [*false_starts, text[len(text) * 3 // 4 :][:10]]


async def put(client: httpx.AsyncClient, ask: Ask, outcome: Outcome | None = None) -> Outcome:
    """Ask once and read to the end, into `outcome` if given. Raises nothing of HTTP: it is in the outcome."""
    outcome = outcome or Outcome(ask)
    try:
        async with client.stream("POST", ask.path, json=dict(ask.body)) as response:
            outcome.replica = response.headers.get("x-raydix-replica")
            if response.status_code != 200:
                _refused(outcome, response.status_code, (await response.aread()).decode(errors="replace"))
            elif ask.is_streamed:
                await _read_stream(outcome, response)
            else:
                _read_whole(outcome, json.loads(await response.aread()))
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        outcome.is_broken_off, outcome.error = True, f"{type(error).__name__}: {error}"
    outcome.ended = time.monotonic()
    return outcome


def _refused(outcome: Outcome, status: int, text: str) -> None:
    """An ingress answers with an OpenAI error object; what Serve's proxy says in its place is no JSON."""
    outcome.error = f"HTTP {status}: {text[:200]}"
    outcome.is_broken_off = True
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        outcome.is_broken_off = not json.loads(text)["error"]["message"]


async def _read_stream(outcome: Outcome, response: httpx.Response) -> None:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    num_tokens, num_logprobs, is_done = 0, 0, False
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        outcome.chunks.append(time.monotonic())
        if line == "data: [DONE]":
            is_done = True
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            outcome.error = chunk["error"]["message"]
            return
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            num_logprobs += _num_logprobs(choice)
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    if is_done:
        outcome.answer = _answer(texts, reasons, num_tokens, num_logprobs)
    else:
        outcome.is_broken_off, outcome.error = True, "the stream ended without an end"


def _read_whole(outcome: Outcome, answer: dict[str, Any]) -> None:
    texts = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]}
    reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
    num_logprobs = sum(_num_logprobs(choice) for choice in answer["choices"])
    outcome.answer = _answer(texts, reasons, answer["usage"]["completion_tokens"], num_logprobs)


def _num_logprobs(choice: dict[str, Any]) -> int:
    return len((choice.get("logprobs") or {}).get("content") or ())


def _answer(texts: dict[int, str], reasons: dict[int, str], num_tokens: int, num_logprobs: int) -> Answer:
    order = sorted(texts)
    said, ends = tuple(texts[i] for i in order), tuple(reasons.get(i, "none") for i in order)
    return Answer(said, ends, num_tokens, num_logprobs)


# --- load ---------------------------------------------------------------------------------------------------


async def drive(
    client: httpx.AsyncClient,
    asks: Sequence[Ask],
    stop: asyncio.Event,
    *,
    at_once: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Ask at random until `stop`, then let what is open end. Keeps `at_once` open, or sends `rate` a second."""
    draw = random.Random(seed)
    outcomes: list[Outcome] = []

    async def one() -> None:
        outcomes.append(await put(client, draw.choice(asks)))

    async def again_and_again() -> None:
        while not stop.is_set():
            await one()
            if outcomes[-1].error is not None:
                await asyncio.sleep(0.2)  # as a client would, before it tries again

    if rate is None:
        await asyncio.gather(*(again_and_again() for _ in range(at_once)))
        return outcomes
    open_: list[asyncio.Task[None]] = []
    while not stop.is_set():
        open_.append(asyncio.create_task(one()))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*open_)
    return outcomes
