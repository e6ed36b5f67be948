"""Converts text to token ids and back, with the server's own chat template.

A raw completions prompt is the client's responsibility and stays as written, special tokens included. In a
conversation, only the template writes control tokens (`deployments.api.conversation.marks`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any, cast

from deployments.api.conversation.control_tokens import control_tokens
from deployments.api.conversation.encoder import Encoder, UnencodedTexts
from deployments.api.conversation.marks import Marks
from deployments.api.conversation.options import PLAIN_OPTIONS, TemplateOptions
from deployments.api.conversation.template import ChatTemplate, all_template_texts, template_text
from deployments.api.dialects.dialect import dialect_of
from deployments.api.dialects.reasoning import THINK
from deployments.api.served.tokenizer_info import tokenizer_info
from deployments.config.limits import Limits
from deployments.config.settings import ChatSettings
from engine.text.detokenizer import Detokenizer, TextStream, TokenDecoder
from engine.text.token_bytes import spelled_bytes
from engine.text.tokenizer import Tokenizer, decoding_backend

MANY_TOKENS = 1024
"""Tokens whose text takes long enough that other threads should run meanwhile."""


class TextCodec:
    """A tokenizer and its chat template. As thread-safe as the tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatSettings | None = None,
        max_cache_bytes: int = Limits().token_cache_bytes,
    ) -> None:
        """`max_cache_bytes` bounds the memory for conversations with their token ids; 0 keeps none."""
        self.tokenizer = tokenizer
        self._decoding = decoding_backend(tokenizer)
        self._detokenizer = Detokenizer(tokenizer)
        self.dialect = dialect_of(tokenizer, chat or ChatSettings())
        calls = self.dialect.tools.marks if self.dialect.tools else ()
        answers = (*(self.dialect.thoughts or THINK).marks, *calls)
        self._control = control_tokens(tokenizer, all_template_texts(tokenizer), answers)
        self._template = ChatTemplate(tokenizer, chat)
        self._encoder = Encoder(tokenizer, template_text(tokenizer), max_cache_bytes, self._control)

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`; special tokens in it keep their meaning.

        Raises TooManyTokens for a text with far more than `max_tokens`, before all of it is encoded.
        """
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a client's text, without control tokens.

        Raises TooManyTokens as `encode` does.
        """
        marks = Marks(self._control)
        return self._encoder.once(marks.pieces(marks.put(text))).encode(max_tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: TemplateOptions = PLAIN_OPTIONS,
        salt: str = "",
    ) -> UnencodedTexts:
        """Return the texts of a conversation up to where the answer begins. Raises `TemplateRefused`.

        Known ids of them come from conversations with the same `salt`.
        """
        marks = Marks(self._control)
        rendered = self._template.render(
            marks.put_into_messages(messages),
            marks.put(list(tools)) or None,
            add_generation_prompt=options.add_generation_prompt,
            continues=options.continues,
            variables=marks.put_into_variables(options.variables) if options.variables else options.variables,
        )
        return self._encoder.begin(marks.pieces(rendered), salt)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation up to where the answer begins. Raises `TemplateRefused`."""
        options = TemplateOptions(add_generation_prompt)
        return self.render_chat(messages, tools, options=options).encode()

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells tokens."""
        return self.tokenizer.convert_ids_to_tokens(token_ids)

    def tokenizer_info(self) -> dict[str, Any]:
        """Return how the tokenizer is configured."""
        return tokenizer_info(self.tokenizer)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`."""
        if self._decoding is None or len(token_ids) < MANY_TOKENS:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Unlike `decode`, this lets other threads run meanwhile.
        (text,) = self._decoding.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def text_stream(
        self,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        keep: Collection[str] | None = (),
        includes_stop: bool = False,
        after: Sequence[int] = (),
    ) -> TextStream:
        """Create the growing text of one generation, cut at the first of `stop`.

        `keep` and `after` are those of `decoder`.
        """
        return TextStream(self.decoder(keep, after), stop, min_tokens=min_tokens, includes_stop=includes_stop)

    def decoder(self, keep: Collection[str] | None = (), after: Sequence[int] = ()) -> TokenDecoder:
        """Create the decoder of one text with the specials `keep`, or all of them for None.

        The text continues that of the tokens `after`, of which their `context` is enough.
        """
        return self._detokenizer.decoder(self._detokenizer.specials if keep is None else keep, after)

    def context(self, keep: Collection[str] | None, after: Sequence[int]) -> list[int]:
        """Return the last tokens of `after`, the only ones on which the following text depends."""
        return self._detokenizer.context(self._detokenizer.specials if keep is None else keep, after)

    @functools.lru_cache(maxsize=16)  # noqa: B019 - lives as long as the process, like the codec
    def single_token(self, text: str) -> int | None:
        """Return the token that is `text`; None if it is several."""
        ids = self.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    @functools.cached_property
    def pair_marks(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens that the tokenizer puts before, between and after two texts that it encodes together."""
        encoded = cast(Any, self.tokenizer)("a", "a")
        parts: tuple[list[int], list[int], list[int]] = ([], [], [])
        part = 0
        for token, owner in zip(encoded["input_ids"], encoded.sequence_ids(), strict=True):
            if owner is None:
                parts[part].append(token)
            else:
                part = owner + 1
        return parts

    @property
    def special_ids(self) -> set[int]:
        """All special tokens."""
        return set(self._detokenizer.specials.values())

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token whose text this is; None if there is none."""
        return self._detokenizer.specials.get(text)

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - lives as long as the process, like the codec
    def token_text(self, token_id: int, *, is_first: bool = False) -> tuple[str, tuple[int, ...]]:
        """Return how one token reads within a text, or as the first of one, and its bytes.

        These may be only a part of a character.
        """
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        if not is_first and not self.is_special(token_id):
            # SentencePiece tokenizers drop the space of a text's first word, but not of an equal word after it.
            twice = self.tokenizer.decode([token_id, token_id], skip_special_tokens=False)
            text = twice.removeprefix(text) or text
        if "\ufffd" not in text:
            return text, tuple(text.encode())
        (spelling,) = self.tokenizer.convert_ids_to_tokens([token_id])
        return text, tuple(spelled_bytes(spelling) or text.encode())

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - see above
    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, hence omitted from generated text."""
        return self.decode([token_id], skip_special_tokens=True) == "" != self.decode([token_id])

    def token_key(self, token_id: int, *, is_first: bool = False) -> str:
        """Return one token as a key of an object; parts of characters, which would look alike, become bytes."""
        text, encoded = self.token_text(token_id, is_first=is_first)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in encoded) if "\ufffd" in text else text

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Number of characters in the longest token, which bounds a text's number of tokens from below."""
        get_vocab = getattr(self.tokenizer, "get_vocab", None)
        return max(map(len, get_vocab()), default=1) if get_vocab else 1024
