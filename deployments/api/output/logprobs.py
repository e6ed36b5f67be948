"""Encodes log-probabilities: OpenAI's formats for completions and chat, vLLM's for prompts.

completions   {"tokens": [...], "token_logprobs": [...], "top_logprobs": [{...}], "text_offset": [...]}
chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}], "refusal": null}
prompt        [null, {"2023": {"logprob", "rank", "decoded_token"}, ...}, ...]
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from deployments.api.output.spelled_text import FirstToken
from deployments.api.served.text_codec import TextCodec
from engine.values.logprobs import TokenLogprobs

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can express; NaN and minus infinity become the lowest."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


class TokenNames(Protocol):
    """How tokens are named in log-probabilities."""

    def token_text(self, token_id: int, *, is_first: bool = False) -> tuple[str, tuple[int, ...]]:
        """Return a token's name, and its bytes, as the first of a text or as a later one."""

    def token_key(self, token_id: int, *, is_first: bool = False) -> str:
        """Return a token's name as the key of an object."""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, hence omitted from generated text."""


class NumberedTokens:
    """Names tokens by their ids: `return_tokens_as_token_ids`."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self.is_special = codec.is_special

    def token_text(self, token_id: int, *, is_first: bool = False) -> tuple[str, tuple[int, ...]]:
        """Return the id, and the token's bytes."""
        return self.token_key(token_id), self._codec.token_text(token_id, is_first=is_first)[1]

    def token_key(self, token_id: int, *, is_first: bool = False) -> str:
        """Return the id."""
        return f"token_id:{token_id}"


class TextOffsets:
    """Counts where tokens begin in a text, in characters: those inside a character, where that begins."""

    def __init__(self, start: int = 0) -> None:
        self._at = start  # whole characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, spelled: bytes) -> int:
        """Append a token of these UTF-8 bytes and return its offset."""
        offset = self._at
        self._at += len(self._decoder.decode(spelled))
        return offset


def prompt_offsets(codec: TokenNames, prompt_ids: Iterable[int], text: str) -> list[int]:
    """Return where each token of a prompt begins in its text, as it was given or decoded.

    Tokens that the tokenizer added are not in the text, and where it normalized the text, offsets are approximate.
    """
    data, at = text.encode(), 0
    offsets, numbers = TextOffsets(), []
    for token in prompt_ids:
        spelled = bytes(codec.token_text(token)[1])
        if not data.startswith(spelled, at):
            # A text's first word lacks the space it has elsewhere; a special token may not be in the text at all.
            spelled = b"" if codec.is_special(token) else spelled.removeprefix(b" ")
        numbers.append(min(offsets.add(spelled), len(text)))
        at += len(spelled)
    return numbers


def completion_logprobs(
    codec: TokenNames, at: Sequence[TokenLogprobs], num_top: int, offsets: Sequence[int]
) -> dict[str, Any]:
    """Encode OpenAI's four lists; `offsets` has one more than `at` when a prompt's first token precedes them."""
    tops = []
    for token in at:
        top: dict[str, float] = {}
        # The chosen token is always included, so there may be one more than requested. Of tokens with equal
        # texts, the likelier one counts.
        for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
            top.setdefault(codec.token_key(token_id, is_first=isinstance(token, FirstToken)), finite(logprob))
        tops.append(top)
    return {
        "tokens": [codec.token_key(token.token_id, is_first=isinstance(token, FirstToken)) for token in at],
        "token_logprobs": [finite(token.logprob) for token in at],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


class OutputOffsets:
    """Where the tokens of one choice begin in its text, which may follow an echoed prompt."""

    def __init__(self, codec: TokenNames, start: int = 0) -> None:
        self._codec, self._at = codec, start

    def add(self, text: str, tokens: Sequence[TokenLogprobs]) -> list[int]:
        """Append a text with the tokens that spell it, or either of them; return where the tokens begin."""
        offsets = TextOffsets(self._at)
        begins = [offsets.add(self._spelled(token)) for token in tokens] if text else [self._at] * len(tokens)
        self._at += len(text)
        return begins

    def _spelled(self, token: TokenLogprobs) -> bytes:
        return bytes(self._codec.token_text(token.token_id, is_first=isinstance(token, FirstToken))[1])


def echo_logprobs(
    codec: TokenNames, prompt_ids: Sequence[int], text: str, scores: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Encode those of an echoed prompt, whose first token has none as nothing precedes it."""
    spelled = completion_logprobs(codec, scores, num_top, prompt_offsets(codec, prompt_ids, text))
    return spelled | {
        "tokens": [codec.token_key(prompt_ids[0]), *spelled["tokens"]],
        "token_logprobs": [None, *spelled["token_logprobs"]],
        "top_logprobs": [None, *spelled["top_logprobs"]],
    }


def chat_logprobs(codec: TokenNames, at: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Encode OpenAI's list of tokens, each with its bytes, which may be only part of a character."""

    def spell(token_id: int, logprob: float, is_first: bool) -> dict[str, Any]:
        text, spelled = codec.token_text(token_id, is_first=is_first)
        return {"token": text, "logprob": finite(logprob), "bytes": spelled}

    content = [
        {
            **spell(token.token_id, token.logprob, is_first),
            "top_logprobs": [spell(token_id, logprob, is_first) for token_id, logprob in token.top[:num_top]],
        }
        for token in at
        for is_first in (isinstance(token, FirstToken),)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(codec: TextCodec, scores: Sequence[TokenLogprobs], num_top: int) -> list[Any]:
    """Encode vLLM's list: one object by token id for each prompt token; the first is null."""
    spelled: list[Any] = [None]
    for at in scores:
        entries = {str(at.token_id): (at.logprob, at.rank)}
        for rank, (token_id, logprob) in enumerate(at.top[:num_top], 1):
            entries.setdefault(str(token_id), (logprob, rank))
        spelled.append(
            {
                key: {"logprob": finite(logprob), "rank": rank, "decoded_token": codec.token_text(int(key))[0]}
                for key, (logprob, rank) in entries.items()
            }
        )
    return spelled
