"""The output of a response while it grows: items of reasoning, text and calls, and the events that report them.

    reasoning ──▶ added · part added · delta … · text done · part done · item done
    text      ──▶ added · part added · delta … · text done · part done · item done
    a call    ──▶ added · delta … · arguments done · item done

One item is open at a time. The encoded output is kept in pieces, because an answer's last events repeat all of it
and copies would delay other threads. A thread may encode it while the event loop reads the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.output_parser import ToolCallDelta
from deployments.api.output.response_encoder import encode_json
from deployments.api.responses.ids import output_id
from deployments.api.responses.tools import ClientName
from engine.values.logprobs import TokenLogprobs

Event = tuple[bytes, Sequence[bytes]]
"""The type of an event, and its fields as JSON without the braces, in pieces."""
Spell = Callable[[Sequence[TokenLogprobs]], bytes]
"""Encodes log-probabilities as entries of an array."""


class _OutputItem(ABC):
    """An item that grows."""

    prefix: str

    def __init__(self, response: str, index: int) -> None:
        self.id = output_id(self.prefix, response, index).encode()
        self.index = index
        self._texts: list[str] = []

    def begun(self) -> list[Event]:
        """Return the events that begin it."""
        return [(b"response.output_item.added", self._of_item(self.encoded(b"in_progress", is_new=True)))]

    @abstractmethod
    def grown(self, text: str) -> Event:
        """Add text, and return its event."""

    def ended(self, status: bytes) -> list[Event]:
        """Return the events that end it."""
        return [(b"response.output_item.done", self._of_item(self.encoded(status)))]

    @abstractmethod
    def encoded(self, status: bytes, *, is_new: bool = False) -> Sequence[bytes]:
        """Encode its present state, or its initial state, in pieces."""

    def _of_item(self, item: Sequence[bytes]) -> Sequence[bytes]:
        return b'"output_index":%d,"item":' % self.index, *item

    def _place(self) -> bytes:
        return b'"item_id":"%b","output_index":%d' % (self.id, self.index)

    def _text(self) -> bytes:
        return encode_json("".join(self._texts))


class _WithPart(_OutputItem):
    """An item whose text is in the one part of its content."""

    event: bytes

    def begun(self) -> list[Event]:
        part = (b"response.content_part.added", self._of_part(self._part(is_new=True)))
        return [*super().begun(), part]

    def ended(self, status: bytes) -> list[Event]:
        done = b'%b,"content_index":0,"text":%b' % (self._place(), self._text()), *self._rest()
        return [
            (self.event + b".done", done),
            (b"response.content_part.done", self._of_part(self._part())),
            *super().ended(status),
        ]

    def _of_part(self, part: Sequence[bytes]) -> Sequence[bytes]:
        return b'%b,"content_index":0,"part":' % self._place(), *part

    @abstractmethod
    def _part(self, *, is_new: bool = False) -> Sequence[bytes]:
        """Encode the part's present state, or its initial state."""

    def _rest(self) -> Sequence[bytes]:
        return ()


class _Thought(_WithPart):
    prefix, event = "rs", b"response.reasoning_text"

    def grown(self, text: str) -> Event:
        self._texts.append(text)
        fields = b'%b,"content_index":0,"delta":%b' % (self._place(), encode_json(text))
        return b"response.reasoning_text.delta", (fields,)

    def encoded(self, status: bytes, *, is_new: bool = False) -> Sequence[bytes]:
        head = b'{"id":"%b","type":"reasoning","status":"%b","summary":[],"content":[' % (self.id, status)
        return head, *(() if is_new else self._part()), b"]}"

    def _part(self, *, is_new: bool = False) -> Sequence[bytes]:
        return (b'{"type":"reasoning_text","text":%b}' % (b'""' if is_new else self._text()),)


class _Said(_WithPart):
    prefix, event = "msg", b"response.output_text"

    def __init__(self, response: str, index: int) -> None:
        super().__init__(response, index)
        self._logprobs: list[bytes] = []
        self._head = self._place() + b',"content_index":0,"delta":'

    def grown(self, text: str, logprobs: bytes = b"") -> Event:
        self._texts.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        fields = b'%b%b,"logprobs":[%b]' % (self._head, encode_json(text), logprobs)
        return b"response.output_text.delta", (fields,)

    def encoded(self, status: bytes, *, is_new: bool = False) -> Sequence[bytes]:
        head = b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[' % (self.id, status)
        return head, *(() if is_new else self._part(is_growing=status == b"in_progress")), b"]}"

    def _part(self, *, is_new: bool = False, is_growing: bool = False) -> Sequence[bytes]:
        text = b'""' if is_new else self._text()
        logprobs = () if is_new or is_growing else _listed((piece,) for piece in list(self._logprobs))
        return b'{"type":"output_text","annotations":[],"logprobs":[', *logprobs, b'],"text":%b}' % text

    def _rest(self) -> Sequence[bytes]:
        return b',"logprobs":[', *_listed((piece,) for piece in list(self._logprobs)), b"]"


class _Called(_OutputItem):
    """A call of a function, or of a custom tool, whose input is a text."""

    prefix, type, event, field = "fc", b"function_call", b"response.function_call_arguments", b"arguments"

    def __init__(self, response: str, index: int, call: ToolCallDelta, client: ClientName | None) -> None:
        """`client` is the client's name of the tool, if it is not the model's."""
        super().__init__(response, index)
        self.number = call.index
        named = {"call_id": call.id, "name": call.name} | ({} if client is None else client._asdict())
        self._name = encode_json(named)[1:-1]

    def grown(self, text: str) -> Event:
        self._texts.append(text)
        return self.event + b".delta", (b'%b,"delta":%b' % (self._place(), encode_json(text)),)

    def ended(self, status: bytes) -> list[Event]:
        done = b'%b,%b,"%b":%b' % (self._place(), self._name, self.field, self._text())
        return [(self.event + b".done", (done,)), *super().ended(status)]

    def encoded(self, status: bytes, *, is_new: bool = False) -> Sequence[bytes]:
        text = b'""' if is_new else self._text()
        form = b'{"id":"%b","type":"%b","status":"%b",%b,"%b":%b}'
        return (form % (self.id, self.type, status, self._name, self.field, text),)


class _CalledCustom(_Called):
    prefix, type, event, field = "ctc", b"custom_tool_call", b"response.custom_tool_call_input", b"input"


_Kind = TypeVar("_Kind", _Thought, _Said)


class GrowingOutput:
    """The output of one response."""

    def __init__(self, response: str, spell: Spell, names: Mapping[str, ClientName]) -> None:
        """`names` are those that the client has for tools in namespaces."""
        self._response, self._spell, self._names = response, spell, names
        self._ended: list[Sequence[bytes]] = []
        self._open: _OutputItem | None = None
        self._space: list[ChoiceDelta] = []  # white space, which is sent only if text follows
        self.is_cut = False
        """Whether the answer was cut off by the number of its tokens."""

    def take(self, delta: ChoiceDelta) -> list[Event]:
        """Add a delta, and return its events."""
        events: list[Event] = []
        if delta.reasoning:
            thought = self._open if isinstance(self._open, _Thought) else self._begin(_Thought, events)
            events.append(thought.grown(delta.reasoning))
        calls = list(delta.calls)
        while calls and isinstance(self._open, _Called) and calls[0].index == self._open.number:
            events.append(self._open.grown(calls.pop(0).arguments))
        if delta.text:  # Tokens of reasoning, of calls and without text are not part of it.
            self._say(delta, events)
        for call in calls:
            if call.name is not None:
                self._end(b"completed", events)
                kind = _CalledCustom if call.is_custom else _Called
                self._open = kind(self._response, len(self._ended), call, self._names.get(call.name))
                events += self._open.begun()
            if call.arguments and self._open is not None:
                events.append(self._open.grown(call.arguments))
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason, events)
        return events

    def output(self, status: bytes) -> list[bytes]:
        """Encode all items as an array, in pieces; one that is open has this status."""
        is_open, items = self._open, list(self._ended)
        if is_open is not None and is_open.index == len(items):
            items.append(is_open.encoded(status))
        return [b"[", *_listed(items), b"]"]

    def _say(self, delta: ChoiceDelta, events: list[Event]) -> None:
        said, deltas = self._open, [*self._space, delta]
        if not isinstance(said, _Said):
            if (self._open is not None or self._ended) and not delta.text.strip():
                self._space = deltas
                return
            said = self._begin(_Said, events)
        self._space = []
        for part in deltas:  # one by one, because each has the tokens that spell its text
            events.append(said.grown(part.text, self._spell(part.logprobs) if part.logprobs else b""))

    def _begin(self, kind: type[_Kind], events: list[Event]) -> _Kind:
        self._end(b"completed", events)
        item = kind(self._response, len(self._ended))
        events += item.begun()
        self._open = item
        return item

    def _end(self, status: bytes, events: list[Event]) -> None:
        if self._open is not None:
            events += self._open.ended(status)
            self._ended.append(self._open.encoded(status))
            self._open, self._space = None, []

    def _finish(self, reason: str, events: list[Event]) -> None:
        self.is_cut = reason == "length"
        if self._open is None and not self._ended:
            self._begin(_Said, events)
        self._end(b"incomplete" if self.is_cut else b"completed", events)


def _listed(entries: Iterable[Sequence[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of entries of an array, with commas between."""
    for at, entry in enumerate(entries):
        if at:
            yield b","
        yield from entry
