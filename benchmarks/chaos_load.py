"""Requests with known answers: each is sent undisturbed first, and must have the same answer under faults.

prepare: send every ask once, undisturbed ──▶ its Answer
drive:   send random asks, many at once, under faults ──▶ Outcome: the same Answer, another one, or none
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

from benchmarks.event_lines import EventLines

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RECONNECT_S = 0.1
"""Seconds before a client connects again."""
LONGEST_S = 180.0
"""Seconds after which it gives up."""
_PASSING = ("overloaded", "overloaded_error", "unavailable", "aborted", "engine_lost")
"""Codes, or types in Anthropic's form, of errors after which a client tries again."""
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
"""Response format whose answers are as long as the others."""
_SYSTEM = "You answer questions on the standard library, briefly and with an example. " * 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One reproducible request: greedy or with a seed."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in chunks."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of an answer that must not depend on faults; one entry per choice, in order."""

    texts: tuple[str, ...]
    reasons: tuple[str, ...]
    num_tokens: int
    """Generated tokens of all choices by `usage`: shows a lost or repeated token even if it has no text."""
    num_logprobs: int
    """Number of tokens with a log-probability, of all choices."""


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are `time.monotonic()`."""

    ask: Ask
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    answer: Answer | None = None
    """The complete answer, or None."""
    error: str | None = None
    """The service's error message."""
    may_try_again: bool = False
    """Whether the error says that the service cannot answer now."""
    is_broken_off: bool = False
    """Whether the answer broke off or is not an ingress's: a live ingress always ends its answers."""
    chunks: list[float] = field(default_factory=list)
    """Times at which chunks arrived."""
    replica: str | None = None
    """Engine replica on which the first choice began."""
    num_reconnects: int = 0
    num_repeated: int = 0
    """Events that came twice."""
    is_resumable: bool = False
    """Whether the events of a stream are to have ids, after which it can be continued."""

    @property
    def longest_pause(self) -> float:
        """Longest time between two chunks, in seconds."""
        return max((b - a for a, b in zip(self.chunks, self.chunks[1:], strict=False)), default=0.0)


def make_asks(count: int, seed: int, tokens: tuple[int, int] = (40, 160), num_preambles: int = 0) -> list[Ask]:
    """Make chats and completions in turn: greedy, seeded, beam search, free, JSON, one and several choices.

    Each prompt begins with a text of its own, and `num_preambles` times as long as a system prompt.
    """
    draw = random.Random(seed)
    return [_make(number, draw, draw.randint(*tokens), num_preambles) for number in range(count)]


def _make(number: int, draw: random.Random, max_tokens: int, num_preambles: int) -> Ask:
    preamble = f"{number}: {_SYSTEM * num_preambles}" if num_preambles else ""
    question = f"What does {draw.choice(_SUBJECTS)} do? ({number})"
    prompt = f"{preamble}{question}"
    seed = draw.randrange(2**40)
    body: dict[str, Any] = {"model": "demo", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    messages = [{"role": "system", "content": preamble or _SYSTEM}, {"role": "user", "content": question}]
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": seed}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("greedy chat", CHAT, {"messages": messages, "temperature": 0}),
        ("seeded chat, 2 choices", CHAT, {"messages": messages, "n": 2, **drawn}),
        ("seeded completion with stop strings", COMPLETIONS, {"prompt": prompt, "stop": [], **drawn}),
        ("greedy completion of 2 prompts", COMPLETIONS, {"prompt": [prompt, question[:9]], "temperature": 0}),
        ("greedy chat with stop strings", CHAT, {"messages": messages, "temperature": 0, "stop": []}),
        ("seeded completion with penalties", COMPLETIONS, {"prompt": prompt, **drawn, **penalties}),
        ("seeded chat, not streamed", CHAT, {"messages": messages, "stream": False, **drawn}),
        ("seeded completion, 3 choices", COMPLETIONS, {"prompt": prompt, "n": 3, "top_k": 40, **drawn}),
        ("seeded chat in JSON, 3 choices", CHAT, {"messages": messages, "n": 3, **drawn, **_NUMBERS}),
        ("greedy chat in JSON", CHAT, {"messages": messages, "temperature": 0, **_NUMBERS}),
        ("seeded chat with logprobs", CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 2, **drawn}),
        ("beam search", COMPLETIONS, {"prompt": prompt, "stream": False, "n": 2, "use_beam_search": True}),
    ]
    name, path, differences = kinds[number % len(kinds)]
    body |= differences
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return Ask(f"{number}: {name}", path, body)


def make_resumable_asks(count: int, seed: int, tokens: tuple[int, int]) -> list[Ask]:
    """Make streams of all kinds in turn, each with a prompt of its own, for clients that reconnect; and beam
    searches, which have no stream and are sent again.
    """
    draw = random.Random(seed)
    return [_make_resumable(number, draw, draw.randint(*tokens)) for number in range(count)]


def _make_resumable(number: int, draw: random.Random, max_tokens: int) -> Ask:
    question = f"What does {draw.choice(_SUBJECTS)} do? ({number})"
    said = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": "demo", "stream": True}
    chat = {**body, "messages": said, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    free = {**chat, "ignore_eos": True}
    text = {**free, "prompt": question}
    del text["messages"]
    drawn = {"temperature": 0.9, "seed": draw.randrange(2**40)}
    number_list = {"type": "array", "items": {"enum": [3, 17, 256]}, "minItems": 30, "maxItems": 50}
    arguments = {"type": "object", "properties": {"numbers": number_list}, "required": ["numbers"]}
    function = {"name": "add", "parameters": {**arguments, "additionalProperties": False}}
    called = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    search = {**text, "use_beam_search": True, "n": 2, "stream": False, "stream_options": None}
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("greedy chat", CHAT, {**free, "temperature": 0}),
        ("chat, 2 choices", CHAT, {**free, "n": 2, **drawn}),
        ("chat in JSON", CHAT, {**chat, **_NUMBERS, **drawn}),
        ("chat with a call", CHAT, {**chat, **called, **drawn, "max_tokens": 300}),
        ("chat with logprobs", CHAT, {**free, "logprobs": True, "top_logprobs": 2, **drawn}),
        ("completion", COMPLETIONS, {**text, **drawn}),
        ("beam search", COMPLETIONS, search),
        ("message", "/v1/messages", {**body, "messages": said, "max_tokens": max_tokens, "temperature": 0}),
        (
            "response",
            "/v1/responses",
            {**body, "input": question, "max_output_tokens": max_tokens, "temperature": 0},
        ),
    ]
    name, path, fields = kinds[number % len(kinds)]
    return Ask(f"{number}: {name}", path, fields)


# --- requests -----------------------------------------------------------------------------------------------


async def prepare(client: httpx.AsyncClient, asks: Sequence[Ask], at_once: int) -> list[tuple[Ask, Answer]]:
    """Return every ask with its undisturbed answer. Stop strings are taken from the answer without them."""
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
    """Return two stop strings of which the text has only beginnings, and one that it contains near its end."""
    false_starts = [text[at : at + 10] + "\x01" for at in (len(text) // 3, len(text) // 2)]
    return [*false_starts, text[len(text) * 3 // 4 :][:10]]


async def put(
    client: httpx.AsyncClient, ask: Ask, outcome: Outcome | None = None, again: str | None = None
) -> Outcome:
    """Send a request and read its answer to the end, into `outcome` if given. HTTP errors are in the outcome, not
    raised. With `again`, an answer that broke off continues at that URL, as often as necessary.
    """
    outcome = outcome or Outcome(ask)
    events, url = _Events(outcome), ask.path
    while True:
        await _connect(client, url, ask, outcome, events)
        is_late = time.monotonic() - outcome.began > LONGEST_S
        if again is None or is_late or not (outcome.is_broken_off or outcome.may_try_again):
            break
        url, outcome.num_reconnects = f"{again}{ask.path}", outcome.num_reconnects + 1
        outcome.is_broken_off, outcome.may_try_again, outcome.error = False, False, None
        if not events.lines.last_id:  # Nothing can be continued, so it begins again.
            events = _Events(outcome)
        await asyncio.sleep(RECONNECT_S)
    outcome.ended = time.monotonic()
    return outcome


async def _connect(client: httpx.AsyncClient, url: str, ask: Ask, outcome: Outcome, events: _Events) -> None:
    """Read from one connection."""
    events.lines.begin()
    headers = events.lines.headers
    if outcome.is_resumable:
        headers["accept"] = "text/event-stream"
    try:
        async with client.stream("POST", url, json=dict(ask.body), headers=headers) as response:
            outcome.replica = outcome.replica or response.headers.get("x-raydix-replica")
            if response.status_code != 200:
                _refused(outcome, response.status_code, (await response.aread()).decode(errors="replace"))
            elif ask.is_streamed:
                async for line in response.aiter_lines():
                    events.take(line)
                events.end()
            else:
                _read_whole(outcome, json.loads(await response.aread()))
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        outcome.is_broken_off, outcome.error = True, f"{type(error).__name__}: {error}"


def _refused(outcome: Outcome, status: int, text: str) -> None:
    """Record an error: an ingress answers with an OpenAI error object, Serve's proxy with plain text."""
    outcome.error = f"HTTP {status}: {text[:200]}"
    outcome.is_broken_off, outcome.may_try_again = True, status in (429, 503)
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        outcome.is_broken_off = not json.loads(text)["error"]["message"]


class _Events:
    """The events of one answer, from one connection or several."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._texts: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._num_tokens = self._num_logprobs = 0
        self._is_done = False
        self._ids: set[str] = set()
        self.lines = EventLines()

    def take(self, line: str) -> None:
        """Take a line of the stream."""
        fields = self.lines.take(line)
        if "id" in fields:
            self._outcome.num_repeated += fields["id"] in self._ids
            self._ids.add(fields["id"])
        if "data" in fields:
            self._take_data(fields["data"])

    def _take_data(self, data: str) -> None:
        self._outcome.chunks.append(time.monotonic())
        if data == "[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if "error" in event and event["error"] is not None:
            self._fail(event["error"])
        elif event.get("type", "").startswith("response."):
            self._take_response(event)
        elif "type" in event:
            self._take_message(event)
        else:
            self._take_chunk(event)

    def end(self) -> None:
        """Make the answer of what was read until the connection ended."""
        outcome = self._outcome
        if outcome.error is not None:
            return
        if self._is_done:
            outcome.answer = _answer(self._texts, self._reasons, self._num_tokens, self._num_logprobs)
        else:
            outcome.is_broken_off, outcome.error = True, "the stream ended before its last event"

    def _fail(self, error: dict[str, Any]) -> None:
        self._outcome.error = error["message"]
        self._outcome.may_try_again = error.get("code", error.get("type")) in _PASSING

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        """Take an event of a chat or a completion."""
        if chunk.get("usage"):
            self._num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            name, delta = str(choice["index"]), choice.get("delta", {})
            self._add(name, choice["text"] if "text" in choice else delta.get("content") or "")
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                self._add(f"{name} call {call['index']}", function.get("name", "") + function.get("arguments", ""))
            self._num_logprobs += _num_logprobs(choice)
            if choice["finish_reason"]:
                self._reasons[name] = choice["finish_reason"]

    def _take_message(self, event: dict[str, Any]) -> None:
        """Take an event of Anthropic's API."""
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            self._add(str(event["index"]), delta.get("text") or delta.get("partial_json") or "")
        elif event["type"] == "message_delta":
            self._num_tokens, self._reasons["0"] = event["usage"]["output_tokens"], event["delta"]["stop_reason"]
        self._is_done = self._is_done or event["type"] == "message_stop"

    def _take_response(self, event: dict[str, Any]) -> None:
        """Take an event of the Responses API."""
        if event["type"].endswith(".delta"):
            self._add(str(event["output_index"]), event["delta"])
        elif event["type"] in ("response.completed", "response.incomplete"):
            response = event["response"]
            self._num_tokens, self._reasons["0"] = response["usage"]["output_tokens"], response["status"]
            self._is_done = True

    def _add(self, name: str, text: str) -> None:
        self._texts[name] = self._texts.get(name, "") + text


def _read_whole(outcome: Outcome, answer: dict[str, Any]) -> None:
    texts = {str(c["index"]): c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]}
    reasons = {str(choice["index"]): choice["finish_reason"] for choice in answer["choices"]}
    num_logprobs = sum(_num_logprobs(choice) for choice in answer["choices"])
    outcome.answer = _answer(texts, reasons, answer["usage"]["completion_tokens"], num_logprobs)


def _num_logprobs(choice: dict[str, Any]) -> int:
    return len((choice.get("logprobs") or {}).get("content") or ())


def _answer(texts: dict[str, str], reasons: dict[str, str], num_tokens: int, num_logprobs: int) -> Answer:
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
    """Send random asks until `stop`, then await the open ones. Keeps `at_once` open, or sends `rate` a second.
    Continues answers that break off.
    """
    draw = random.Random(seed)
    outcomes: list[Outcome] = []

    async def one() -> None:
        ask = draw.choice(asks)
        again = str(client.base_url).rstrip("/")
        outcomes.append(await put(client, ask, Outcome(ask, is_resumable=ask.is_streamed), again))

    async def again_and_again() -> None:
        while not stop.is_set():
            await one()
            if outcomes[-1].error is not None:
                await asyncio.sleep(0.2)  # a client would wait as well before a retry

    if rate is None:
        await asyncio.gather(*(again_and_again() for _ in range(at_once)))
        return outcomes
    open_: list[asyncio.Task[None]] = []
    while not stop.is_set():
        open_.append(asyncio.create_task(one()))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*open_)
    return outcomes
