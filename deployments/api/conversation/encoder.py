"""Encodes conversations, reusing the parts that were encoded for the last turn."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.conversation.control_guard import ControlGuard
from deployments.api.conversation.control_tokens import ControlTokens
from deployments.api.conversation.cuts import cut, cut_pattern
from deployments.api.conversation.piece_cache import PieceCache
from engine.text.tokenizer import Tokenizer, encoding_backend, panics_as_errors

LONG_TOKEN_BYTES = 6
"""Tokens have fewer bytes than this on average in nearly every text, but not in every one."""
PIECE_CHARS = 65_536
"""Characters of a very long text that are encoded before its tokens are counted again."""
_BORDER_TOKENS = 16
"""More tokens than a cut in a text can add."""


class TooManyTokens(ValueError):
    """A text has far more tokens than were allowed; not all of it was encoded."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has at least {least} tokens")
        self.least = least


class Encoder:
    """Encodes texts as a tokenizer does, faster."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, max_cache_bytes: int, control: ControlTokens | None = None
    ) -> None:
        """`template` is the chat template's source; `max_cache_bytes` bounds the cache of texts and their ids."""
        self._tokenizer = tokenizer
        self._backend = backend = encoding_backend(tokenizer)
        self._cuts = cut_pattern(backend, template) if backend is not None and max_cache_bytes else None
        self._cache = PieceCache(max_cache_bytes)
        self._guard = ControlGuard(self._encode_all, control or ControlTokens({}))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`; special tokens in it keep their meaning.

        Raises TooManyTokens for a text with far more than `max_tokens`, before all of a very long one is encoded.
        """
        if max_tokens is not None and len(text.encode()) > max_tokens * LONG_TOKEN_BYTES:
            self._check_count(text, max_tokens)
        if self._backend is None:
            with panics_as_errors():
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, this lets other threads run meanwhile, and omits each token's place in the text.
        with panics_as_errors():
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > 2 * max_tokens:
            raise TooManyTokens(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def _check_count(self, text: str, max_tokens: int) -> None:
        """Raise TooManyTokens as soon as the pieces so far have more than `max_tokens`."""
        least = 0
        for begin in range(0, len(text), PIECE_CHARS):
            piece = text[begin : begin + PIECE_CHARS]
            least += len(self.encode(piece, add_special_tokens=False)) - _BORDER_TOKENS
            if least > max_tokens:
                raise TooManyTokens(least)

    def encode_guarded(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of part of a conversation, whose control tokens are those that it spells.

        Raises TooManyTokens as `encode` does.
        """
        return self._guard.checked(text, self.encode(text, add_special_tokens=False, max_tokens=max_tokens))

    def _encode_all(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def once(self, texts: Sequence[str]) -> UnencodedTexts:
        """Prepare texts that are to be encoded one by one, without keeping their ids."""
        return UnencodedTexts(self, None, "", texts)

    def begin(self, texts: Sequence[str], salt: str) -> UnencodedTexts:
        """Look up known ids of texts that are to be encoded one by one."""
        if self._cuts is None:
            return UnencodedTexts(self, None, salt, texts)
        pieces = [piece for text in texts for piece in cut(text, self._cuts)]
        return UnencodedTexts(self, self._cache, salt, pieces)


class UnencodedTexts:
    """Texts whose token ids, put together, are those of a prompt; some of them are known."""

    def __init__(self, encoder: Encoder, cache: PieceCache | None, salt: str, texts: Sequence[str]) -> None:
        self._encoder, self._cache, self._salt, self._texts = encoder, cache, salt, texts
        self._known = [None] * len(texts) if cache is None else cache.find(salt, texts)

        self.num_chars = sum(map(len, texts))
        """Number of characters of all texts."""
        self.num_new_chars = sum(len(text) for text, ids in zip(texts, self._known, strict=True) if ids is None)
        """Number of characters that `encode` has to encode."""

    def encode(self, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of all texts, and remember those of the new ones.

        Raises TooManyTokens when texts that are long for `max_tokens` turn out to have more.
        """
        if max_tokens is not None and self.num_chars <= max_tokens:
            max_tokens = None  # Some characters are several tokens, but too few to matter.
        all_ids: list[int] = []
        new: list[tuple[str, list[int]]] = []
        for text, known in zip(self._texts, self._known, strict=True):
            if known is not None:
                all_ids += known
                continue
            left = None if max_tokens is None else max(max_tokens - len(all_ids), 0)
            ids = self._encode(text, len(all_ids), left)
            new.append((text, ids))
            all_ids += ids
        if new and self._cache is not None:
            self._cache.keep(self._salt, new)
        return all_ids

    def _encode(self, text: str, num_before: int, max_tokens: int | None) -> list[int]:
        """Encode a text after `num_before` tokens. Raises TooManyTokens, counted from the beginning."""
        try:
            ids = self._encoder.encode_guarded(text, max_tokens)
        except TooManyTokens as error:
            raise TooManyTokens(num_before + error.least) from None
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokens(num_before + len(ids))
        return ids
