"""Encodes conversations, of which most was encoded for the last turn already."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.conversation.control_guard import ControlGuard
from deployments.api.conversation.control_tokens import ControlTokens
from deployments.api.conversation.cuts import cut, cut_pattern
from deployments.api.conversation.piece_cache import PieceCache
from engine.tokenizer import Tokenizer, encoding_backend


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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens in it keep their meaning."""
        if self._backend is None:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # Unlike `encode`, this lets other threads run meanwhile, and leaves out each token's place in the text.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_guarded(self, text: str) -> list[int]:
        """Return the token ids of part of a conversation, whose control tokens are those that it spells."""
        return self._guard.checked(text, self.encode(text, add_special_tokens=False))

    def _encode_all(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def begin(self, texts: Sequence[str], salt: str) -> UnencodedTexts:
        """Look up what is known of texts that are to be encoded one by one."""
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

    def encode(self) -> list[int]:
        """Return the token ids of all texts, and remember those of the new ones."""
        all_ids: list[int] = []
        new: list[tuple[str, list[int]]] = []
        for text, known in zip(self._texts, self._known, strict=True):
            if known is not None:
                all_ids += known
                continue
            ids = self._encoder.encode_guarded(text)
            new.append((text, ids))
            all_ids += ids
        if new and self._cache is not None:
            self._cache.keep(self._salt, new)
        return all_ids
