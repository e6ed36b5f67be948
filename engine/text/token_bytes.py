"""The bytes of each token, in vocabularies whose texts are the joined bytes of their tokens.

    byte-level, as GPT-2, Llama 3 and Qwen      "Ġthe" ─▶ 20 74 68 65      "ðŁĺ" ─▶ F0 9F 98
    byte fallback, as Llama 2 and Gemma         "▁the" ─▶ 20 74 68 65      "<0xF0>" ─▶ F0

A token of such a text can be decoded without those before it. The exception is the space that SentencePiece
tokenizers insert before a text's first word and remove again.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

_BYTE_LEVEL = {"type": "ByteLevel"}
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_FALLBACK = [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token."""

    by_id: Mapping[int, bytes]
    strips_space: bool = False
    """Whether a text's first character is omitted if it is a space."""

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """Read a tokenizer's table; None if its texts are not the joined bytes of its tokens."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or (spell := _speller(_steps(backend.decoder))) is None:
            return None
        tokens = {token_id: token for token, token_id in backend.get_vocab().items()}
        tokens |= {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        by_id = {token_id: spell(token) for token_id, token in tokens.items()}
        table = cls(by_id, strips_space=_STRIP in _steps(backend.decoder))
        return table if table._decodes_as(tokenizer) else None

    def without(self, hidden: Collection[int]) -> TokenBytes:
        """Return a table in which these tokens have no bytes."""
        return replace(self, by_id={**self.by_id, **dict.fromkeys(hidden, b"")})

    def join(self, token_ids: Collection[int]) -> bytes:
        """Return the tokens' bytes. Ids that the tokenizer does not have have none."""
        get = self.by_id.get
        return b"".join([get(token_id, b"") for token_id in token_ids])

    def _decodes_as(self, tokenizer: Any) -> bool:
        """Return whether all tokens that are whole characters, joined to one text, read as the tokenizer decodes
        them.

        It may do more than its decoder declares, such as remove spaces before punctuation.
        """
        pairs = sorted(self.by_id.items())
        ids = [token_id for token_id, own in pairs if "\ufffd" not in own.decode(errors="replace")]
        text = self.join(ids).decode()
        text = text.removeprefix(" ") if self.strips_space else text
        return bool(text == tokenizer.decode(ids, skip_special_tokens=False))


def spelled_bytes(spelling: str) -> bytes | None:
    """Return the bytes of a vocabulary entry: a fallback such as "<0xE2>", or letters of GPT-2's alphabet."""
    if (byte := _fallback_byte(spelling)) is not None:
        return byte
    alphabet = _byte_alphabet()
    return bytes([alphabet[char] for char in spelling]) if alphabet.keys() >= set(spelling) else None


def _speller(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """Return the function from a token to its bytes in a vocabulary whose texts are decoded in these steps."""
    if steps == [_BYTE_LEVEL]:
        return _of_byte_level
    return _of_fallback if steps in (_FALLBACK, [*_FALLBACK, _STRIP]) else None


def _of_byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # an added token, which is spelled as its text
        return token.encode()


def _of_fallback(token: str) -> bytes:
    byte = _fallback_byte(token)
    return token.replace("▁", " ").encode() if byte is None else byte


def _fallback_byte(token: str) -> bytes | None:
    found = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token) if token.startswith("<0x") else None
    return bytes([int(found[1], 16)]) if found else None


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder of the `tokenizers` library, without settings that change no text."""
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return [_BYTE_LEVEL if step["type"] == "ByteLevel" else step for step in steps]


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character in GPT-2's alphabet, which byte-level vocabularies use."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
