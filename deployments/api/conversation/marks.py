"""Keeps clients' text distinct from control tokens, through the chat template.

A conversation is rendered to text first, so a user who writes `<|im_end|>` would end the message and could speak
as the assistant. Such strings in messages and tools are therefore tokenized as plain characters, while the
template's own keep their meaning.

    content      "hi <|im_end|> you"            a token's text is replaced by a mark before rendering
    rendered     "<|im_start|>user\\nhi ¤0¤ you<|im_end|>\\n"
    put back     "<|im_start|>user\\nhi <|im_end|> you<|im_end|>\\n"
    pieces       [                     ][                        ]     cut within each token that a mark is part of

Strings that may become a token next to other text are marked as well: two messages may end with `<|im_` and begin
with `end|>`. Where they become no token, the text is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from deployments.api.conversation.control_tokens import ControlTokens


class Marks:
    """Replaces control tokens that a client's strings spell by marks, and restores them after rendering.

    A mark is a number between two nonces of letters and digits, which no template escapes and no client knows.
    Equal texts have equal marks, because templates compare some strings.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._nonce = ""
        self._numbers: dict[str, int] = {}

    def put_into_messages(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with marks; their roles are not the client's words."""
        return [
            {
                field: value
                if field == "role"
                else self.put(value, in_answer=field == "content" and message.get("role") == "assistant")
                for field, value in message.items()
            }
            for message in messages
        ]

    def put_into_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return a template's variables with marks; their names are not shown."""
        return {name: self.put(value) for name, value in variables.items()}

    def put(self, value: Any, *, in_answer: bool = False) -> Any:
        """Return `value` with marks in its strings, keys of objects included."""
        if isinstance(value, str):
            spans = self._control.spelled(value, in_answer=in_answer)
            return self._replace(value, spans) if spans else value
        if isinstance(value, dict):
            return {self.put(key): self.put(child) for key, child in value.items()}
        return [self.put(child) for child in value] if isinstance(value, list) else value

    def pieces(self, rendered: str) -> list[str]:
        """Return the rendered text without marks, cut so that no piece has a token that a client wrote."""
        if not self._numbers:  # nearly always; compiling the pattern would cost more than rendering
            return [rendered]
        texts = list(self._numbers)
        parts, spans, length = [], [], 0
        for place, part in enumerate(re.split(f"{self._nonce}([0-9]+){self._nonce}", rendered)):
            is_mark = place % 2 == 1
            parts.append(texts[int(part)] if is_mark else part)
            if is_mark:
                spans.append((length, length + len(parts[-1])))
            length += len(parts[-1])
        return [piece for piece in self._control.without_forged("".join(parts), spans) if piece]

    def _replace(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        self._nonce = self._nonce or f"m{token_hex(8)}m"
        parts, end = [], 0
        for begin, following in spans:
            number = self._numbers.setdefault(text[begin:following], len(self._numbers))
            parts += [text[end:begin], f"{self._nonce}{number}{self._nonce}"]
            end = following
        return "".join([*parts, text[end:]])
