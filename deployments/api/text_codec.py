"""Text to token ids and back, with the server's own chat template.

A conversation is rendered to text first, so a user who writes `<|im_end|>` would end his message and could speak
as the assistant. Such strings in message contents are therefore tokenized as the plain characters they are; the
template's own keep their meaning. A raw completions prompt is the client's own affair and stays as written.

    content      "hi <|im_end|> you"            a special token's text: replaced by a mark before rendering
    rendered     "<|im_start|>user\\nhi ¤ you<|im_end|>\\n"
    pieces       [     with specials      ] [plain] [      with specials       ]
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any

from engine.detokenizer import TextStream
from engine.tokenizer import Tokenizer


class TemplateRefused(ValueError):
    """The chat template cannot render these messages; the message is fit for the client."""


class TextCodec:
    """A tokenizer and its chat template. Thread-safe as far as the tokenizer is: nothing here changes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = [text for text in getattr(tokenizer, "all_special_tokens", []) if text]
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens in it keep their meaning."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation up to where the answer begins. Raises `TemplateRefused`."""
        mark = f"\ufdd0{secrets.token_hex(8)}\ufdd1"
        plain: list[str] = []
        marked = [{**message, "content": self._mark(message["content"], mark, plain)} for message in messages]
        pieces = self._render(marked, add_generation_prompt).split(mark)
        ids = self.encode(pieces[0], add_special_tokens=False)
        for special, piece in zip(plain, pieces[1:], strict=False):
            ids += self._encode_plain(special)
            ids += self.encode(piece, add_special_tokens=False) if piece else []
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_stream(self, stop: Sequence[str] = (), *, min_tokens: int = 0) -> TextStream:
        """The text of one generation as it grows, cut at the first of `stop`."""
        return TextStream(self._tokenizer, stop, min_tokens=min_tokens)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as the process, like the codec
    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """How one token reads within a text, and its bytes: a token may be a part of a character only."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if not self.is_special(token_id):
            # Tokenizers of the SentencePiece kind drop the space of a word that begins a text: the second of two
            # equal words has it.
            twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
            text = twice.removeprefix(text) or text
        if "\ufffd" not in text:
            return text, tuple(text.encode())
        (spelling,) = self._tokenizer.convert_ids_to_tokens([token_id])
        return text, tuple(_spelled_bytes(spelling) or text.encode())

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - as above
    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text: generated text is without it."""
        return self.decode([token_id], skip_special_tokens=True) == "" != self.decode([token_id])

    def token_key(self, token_id: int) -> str:
        """One token as a key of an object: parts of characters are spelled as bytes, as they all read alike."""
        text, spelled = self.token_text(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled) if "\ufffd" in text else text

    @functools.cached_property
    def max_token_chars(self) -> int:
        """No token covers more characters than this: bounds the tokens of a text from below."""
        get_vocab = getattr(self._tokenizer, "get_vocab", None)
        return max(map(len, get_vocab()), default=1) if get_vocab else 1024

    def _mark(self, content: str, mark: str, plain: list[str]) -> str:
        """`content` with each special token's text replaced by `mark` and appended to `plain`."""
        if self._specials is None:
            return content

        def take(found: re.Match[str]) -> str:
            plain.append(found.group())
            return mark

        return self._specials.sub(take, content)

    def _encode_plain(self, special: str) -> list[int]:
        """A special token's text as plain text: cut after its first character it is not special any more."""
        head, rest = special[:1], special[1:]
        return self.encode(head, add_special_tokens=False) + self.encode(rest, add_special_tokens=False)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            rendered = self._tokenizer.apply_chat_template(messages, **options)
        except TemplateError as error:
            if isinstance(error, TemplateSyntaxError | UndefinedError):
                raise TemplateRefused("The model's chat template cannot render these messages.") from error
            raise TemplateRefused(f"The model's chat template refuses these messages: {error}.") from error
        except ValueError as error:  # the tokenizer has no template
            raise TemplateRefused("This model has no chat template; use /v1/completions.") from error
        return str(rendered)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, which byte-level vocabularies use."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _spelled_bytes(spelling: str) -> bytes | None:
    """The bytes of a vocabulary entry that is no whole text: byte fallback "<0xE2>" or byte-level letters."""
    fallback = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", spelling)
    if fallback:
        return bytes([int(fallback[1], 16)])
    alphabet = _byte_alphabet()
    return bytes(alphabet[char] for char in spelling) if all(char in alphabet for char in spelling) else None
