"""The prompts of a program: their forms, and the answer to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.batch.runner import BatchCall, NoReply, Reply

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text or token ids to continue, the messages of a chat, or a whole body of either endpoint."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one prompt."""

    index: int
    """Position of the prompt in the call."""
    status: int
    """The HTTP status that a client would have received; 200 if the prompt was answered."""
    body: dict[str, Any]
    """The answer in the HTTP API's form, or its error object."""
    request_id: str = ""
    """The request's id in logs and traces."""
    ignored_fields: str = ""
    """The fields of the body that the API ignored, with commas between them."""

    @property
    def text(self) -> str | None:
        """The first choice's text; None if there is none."""
        for choice in self.body.get("choices", ()):
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            return None if text is None else str(text)
        return None

    @property
    def error(self) -> str | None:
        """Why there is no answer; None if there is one."""
        return None if self.status < 400 else str(self.body["error"]["message"])


def call_for(index: int, prompt: object, fields: Mapping[str, Any]) -> BatchCall[int] | Answer:
    """Return the request for a prompt, with those `fields` that it does not set itself, or why there is none."""
    try:
        body = {**fields, **_own_fields(prompt)}
        content = msgspec.json.encode(body, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        return _wrong(index, f"This prompt cannot be sent: {error}.")
    if body.get("stream"):
        return _wrong(index, "stream is set; an answer in a batch is whole. Leave it out.")
    return BatchCall(index, CHAT_URL if "messages" in body else COMPLETION_URL, content)


def answer_of(index: int, reply: Reply | NoReply) -> Answer:
    """Return the outcome of a prompt, given the last reply to its request."""
    if isinstance(reply, NoReply):
        return _wrong(index, str(reply), 503)
    return Answer(index, reply.status, msgspec.json.decode(reply.body), reply.request_id, reply.ignored_fields)


def _own_fields(prompt: Any) -> Mapping[str, Any]:
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not hasattr(prompt, "__getitem__"):  # NumPy's arrays are sequences in all but their class
        raise TypeError(f"{type(prompt).__name__} is neither a text, nor token ids, nor messages, nor a body")
    return {"messages" if len(prompt) and isinstance(prompt[0], Mapping) else "prompt": prompt}


def _plain(value: Any) -> Any:
    """Convert NumPy's arrays and numbers, which columns of data sets hold, to Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds an object of {type(value).__name__}, which JSON cannot express")


def _wrong(index: int, message: str, status: int = 400) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Answer(index, status, {"error": error})
