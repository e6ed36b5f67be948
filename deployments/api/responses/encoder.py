"""Encodes answers as response objects, and as the typed events of a stream.

    event: response.output_text.delta
    data: {"type":"response.output_text.delta","sequence_number":7,"item_id":"msg_…",…}

A stream ends with the event that has the whole response, and without [DONE].
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from deployments.api.base.errors import ApiError
from deployments.api.output.choice import ChoiceDelta
from deployments.api.output.logprobs import chat_logprobs
from deployments.api.output.response_encoder import ResponseContext, encode_json
from deployments.api.responses.answer import Event, GrowingOutput
from deployments.api.responses.tools import ClientName
from deployments.api.served.text_codec import TextCodec
from engine.values.logprobs import TokenLogprobs

SERVER_STOPPED = "server_stopped"
"""Code of an error after which another ingress can continue the response."""
_ERRORS = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponseObject:
    """The object of one response, whose fields are the same in all its states but for a few."""

    def __init__(self, context: ResponseContext, repeated: bytes, fields: dict[str, Any]) -> None:
        """`repeated` has the fields that repeat the request, as JSON; `fields` are others that never change."""
        head = {"id": context.id, "object": "response", "created_at": context.created, "model": context.model}
        self._head = encode_json(head)[:-1]
        self._fields = encode_json(fields)[1:-1] + b"," + repeated[1:-1]

    def correct(self, said: bytes, right: bytes) -> tuple[bytes, bytes]:
        """Set a field to its value in `right`; return the parts before and after that are the same in all
        states."""
        before = self._fields
        self._fields = before.replace(said, right, 1)
        return before, self._fields

    def encoded(
        self,
        status: str,
        output: Sequence[bytes] = (b"[]",),
        *,
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        cut_by: str | None = None,
        timings: dict[str, Any] | None = None,
    ) -> list[bytes]:
        """Encode it in one of its states, in pieces. `cut_by` is the reason for which it is incomplete."""
        state: dict[str, Any] = {
            "status": status,
            "error": error,
            "incomplete_details": None if cut_by is None else {"reason": cut_by},
            "usage": usage,
        }
        if status == "completed":
            state["completed_at"] = int(time.time())
        if timings is not None:
            state["timings"] = timings
        rest = encode_json(state)[1:-1]
        return [self._head, b",", rest, b',"output":', *output, b",", self._fields, b"}"]


class ResponsesEncoder:
    """Encodes one response."""

    takes_singly = True

    def __init__(
        self,
        context: ResponseContext,
        codec: TextCodec,
        form: ResponseObject,
        *,
        names: Mapping[str, ClientName],
        num_top: int,
        is_background: bool = False,
    ) -> None:
        """`names` are those that the client has for tools in namespaces. `num_top` alternatives are reported with
        each log-probability.
        """
        self.context = context
        self._form = form
        self._is_background = is_background
        self._answer = GrowingOutput(context.id, partial(_spelled, codec, num_top), names)
        self._num_events = 0
        self._is_begun = False
        self.is_failed = False
        """Whether it ended without a complete answer."""
        self.is_moved = False
        """Whether another ingress continues it, or can."""
        self.final: list[bytes] | None = None
        """The response as it ended, in pieces; None before that."""

    # --- a stream ------------------------------------------------------------------------------------------

    def opening(self, index: int, num_cached: int) -> bytes:
        """Encode the events that begin the stream."""
        self._is_begun = True
        running = [b'"response":', *self._form.encoded("in_progress")]
        if not self._is_background:
            return self._events([(b"response.created", running), (b"response.in_progress", running)])
        queued = [b'"response":', *self._form.encoded("queued")]
        return self._events(
            [(b"response.created", queued), (b"response.queued", queued), (b"response.in_progress", running)]
        )

    def delta(self, delta: ChoiceDelta) -> bytes:
        """Encode the events of one delta."""
        return self._events(self._answer.take(delta))

    def end(self, extras: dict[str, Any]) -> bytes:
        """Encode the event with the whole response."""
        ended = self._finish(extras)
        kind = b"response.incomplete" if self._answer.is_cut else b"response.completed"
        return self._events([(kind, [b'"response":', *ended])])

    def failure(self, error: ApiError, request_id: str) -> bytes:
        """Encode the events that end a stream which failed after it had begun."""
        what = {"code": error.code or error.type, "message": error.message, "param": error.param}
        fields = encode_json(what | {"request_id": request_id})[1:-1]
        if error.code in ("taken_over", SERVER_STOPPED):
            self.is_moved = True
            return self._events([(b"error", (fields,))])
        failed = [b'"response":', *self.failed(error)]
        return self._events([(b"error", (fields,)), (b"response.failed", failed)])

    # --- states --------------------------------------------------------------------------------------------

    def whole(self, deltas: Sequence[Sequence[ChoiceDelta]], extras: dict[str, Any]) -> list[bytes]:
        """Encode the response from all its deltas."""
        for delta in deltas[0]:
            self._answer.take(delta)
        return self._finish(extras)

    def failed(self, error: ApiError, *, has_output: bool = True) -> list[bytes]:
        """End the response with an error, and encode it, with or without its partial output."""
        self.is_failed = True
        what = {"code": _ERRORS.get(error.status, "server_error"), "message": error.message}
        output = self._answer.output(b"incomplete") if has_output else (b"[]",)
        self.final = self._form.encoded("failed", output, error=what)
        return self.final

    def cancelled(self) -> list[bytes]:
        """End the response with its partial output, and encode it."""
        self.is_failed = True
        self.final = self._form.encoded("cancelled", self._answer.output(b"incomplete"))
        return self.final

    def correct(self, sent: Sequence[bytes], said: bytes, right: bytes) -> list[bytes]:
        """Say something else of the response than its request did, also in `sent`, its end that was encoded."""
        before, after = self._form.correct(said, right)
        if self.final is not None:
            self.final = [piece.replace(before, after) for piece in self.final]
        return [piece.replace(before, after) for piece in sent]

    def now(self) -> list[bytes]:
        """Encode the response as it is, in pieces."""
        if self.final is not None:
            return self.final
        if not self._is_begun:
            return self._form.encoded("queued")
        return self._form.encoded("in_progress", self._answer.output(b"in_progress"))

    def _finish(self, extras: dict[str, Any]) -> list[bytes]:
        is_cut = self._answer.is_cut
        self.final = self._form.encoded(
            "incomplete" if is_cut else "completed",
            self._answer.output(b"completed"),
            usage=_usage(extras["usage"]),
            cut_by="max_output_tokens" if is_cut else None,
            timings=extras.get("timings"),
        )
        return self.final

    def _events(self, events: Iterable[Event]) -> bytes:
        encoded = list[bytes]()
        for kind, fields in events:
            head = b'event: %b\ndata: {"type":"%b","sequence_number":%d,' % (kind, kind, self._num_events)
            encoded += (head, *fields, b"}\n\n")
            self._num_events += 1
        return b"".join(encoded)  # which lets other threads continue where it is large


# Not a method, which would refer to the encoder that refers to it, so that ended responses need no collection.
def _spelled(codec: TextCodec, num_top: int, logprobs: Sequence[TokenLogprobs]) -> bytes:
    return encode_json(chat_logprobs(codec, logprobs, num_top)["content"])[1:-1]


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": chat["completion_tokens_details"],
        "total_tokens": chat["total_tokens"],
    }
