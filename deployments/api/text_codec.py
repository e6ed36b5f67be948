"""Converts text to token ids and back, with the server's own chat template.

A conversation is rendered to text first, so a user who writes `<|im_end|>` would end the message and could speak
as the assistant. Such strings in messages and tools are therefore tokenized as plain characters, while the
template's own keep their meaning. A raw completions prompt is the client's responsibility and stays as written.

    content      "hi <|im_end|> you"            a special token's text is replaced by a mark before rendering
    rendered     "<|im_start|>user\\nhi ¤0¤ you<|im_end|>\\n"
    pieces       [     with specials      ] [plain] [      with specials       ]
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from deployments.api.output.dialect import dialect_of
from deployments.config.settings import ChatSettings
from engine.detokenizer import Detokenizer, TextStream
from engine.token_bytes import spelled_bytes
from engine.tokenizer import Tokenizer


class TemplateRefused(ValueError):
    """The chat template cannot render these messages. The error's text may be shown to the client."""


class TextCodec:
    """A tokenizer and its chat template. Immutable, hence as thread-safe as the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self.dialect = dialect_of(tokenizer, chat or ChatSettings())
        named = [text for text in getattr(tokenizer, "all_special_tokens", []) if text]
        # tokenizer_config.json often names no more than the first and the last; tokenizer.json has all.
        specials = dict.fromkeys([*named, *self._detokenizer.specials])
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens in it keep their meaning."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation up to where the answer begins. Raises `TemplateRefused`."""
        marks = _Marks(self._specials)
        rendered = self._render(marks.put(list(messages)), marks.put(list(tools)) or None, add_generation_prompt)
        ids: list[int] = []
        for piece, special in marks.find(rendered):
            ids += self.encode(piece, add_special_tokens=False) if piece else []
            ids += self._encode_plain(special) if special else []
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_stream(
        self, stop: Sequence[str] = (), *, min_tokens: int = 0, keep: Collection[str] = ()
    ) -> TextStream:
        """Create the growing text of one generation, cut at the first of `stop`, with the specials `keep`."""
        return TextStream(self._detokenizer.decoder(keep), stop, min_tokens=min_tokens)

    def has_special(self, text: str) -> bool:
        """Return whether `text` is the text of a special token."""
        return text in self._detokenizer.specials

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as the process, like the codec
    def token_text(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """Return how one token reads within a text, and its bytes, which may be only part of a character."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if not self.is_special(token_id):
            # SentencePiece tokenizers drop the space of a text's first word, but not of an equal word after it.
            twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
            text = twice.removeprefix(text) or text
        if "\ufffd" not in text:
            return text, tuple(text.encode())
        (spelling,) = self._tokenizer.convert_ids_to_tokens([token_id])
        return text, tuple(spelled_bytes(spelling) or text.encode())

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - see above
    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, hence left out of generated text."""
        return self.decode([token_id], skip_special_tokens=True) == "" != self.decode([token_id])

    def token_key(self, token_id: int) -> str:
        """Return one token as a key of an object; parts of characters, which would look alike, become bytes."""
        text, encoded = self.token_text(token_id)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded) if "\ufffd" in text else text

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Number of characters in the longest token, which bounds a text's number of tokens from below."""
        get_vocab = getattr(self._tokenizer, "get_vocab", None)
        return max(map(len, get_vocab()), default=1) if get_vocab else 1024

    def _encode_plain(self, special: str) -> list[int]:
        """Encode a special token's text as plain text: cut after its first character, it is no longer special."""
        head, rest = special[:1], special[1:]
        return self.encode(head, add_special_tokens=False) + self.encode(rest, add_special_tokens=False)

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except TemplateError as error:
            if isinstance(error, TemplateSyntaxError | UndefinedError):
                raise TemplateRefused("The model's chat template cannot render these messages.") from error
            raise TemplateRefused(f"The model's chat template refuses these messages: {error}.") from error
        except ValueError as error:  # the tokenizer has no template
            raise TemplateRefused("This model has no chat template; use /v1/completions.") from error
        return str(rendered)


class _Marks:
    """Replaces the texts of special tokens in a client's strings by marks, and finds them after rendering.

    A mark is a number between two nonces of letters and digits, which no template escapes and no client knows.
    """

    def __init__(self, specials: re.Pattern[str] | None) -> None:
        self._specials = specials
        self._nonce = f"m{secrets.token_hex(8)}m"
        self._texts: list[str] = []

    def put(self, value: Any) -> Any:
        """Return `value` with marks in its strings, keys of objects included."""
        if self._specials is None:
            return value
        if isinstance(value, str):
            return self._specials.sub(self._take, value)
        if isinstance(value, dict):
            return {self.put(key): self.put(child) for key, child in value.items()}
        return [self.put(child) for child in value] if isinstance(value, list) else value

    def find(self, rendered: str) -> Iterator[tuple[str, str]]:
        """Yield stretches of the rendered text, each with the client's special token text that follows it."""
        if not self._texts:  # nearly always; compiling the pattern would cost more than rendering
            yield rendered, ""
            return
        *pairs, rest = re.split(f"{self._nonce}([0-9]+){self._nonce}", rendered)
        for text, number in zip(pairs[::2], pairs[1::2], strict=True):
            yield text, self._texts[int(number)]
        yield rest, ""

    def _take(self, found: re.Match[str]) -> str:
        self._texts.append(found.group())
        return f"{self._nonce}{len(self._texts) - 1}{self._nonce}"
