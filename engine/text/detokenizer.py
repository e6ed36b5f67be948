"""Turns token ids into text as early as it is certain.

Text has to wait for two reasons. A character may be spelled by several tokens, so the text of the last ones is not
final until it is complete. And text that may begin a stop string is held back until this is decided.

    token ids ── Detokenizer.decoder ──▶ certain text ── TextStream ──▶ text to show
                 holds open characters                   holds what may begin a stop string

Text that continues a prompt is the part of decode(prompt + output) after decode(prompt). It differs from
decode(output) in the space before a word with which the output begins, which SentencePiece tokenizers remove only
where no text precedes, and in a character that begins in the prompt.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import filterfalse, islice
from typing import Protocol

from engine.base.structs import Struct
from engine.text.token_bytes import TokenBytes
from engine.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most this many replacement characters may still become a character.
_MAX_OPEN = 3
# Tokens of a prompt that are decoded before its output. Each that shows text has a byte or more.
_CONTEXT = 16
# Bytes that never become a character keep the window open, so a window with more tokens is cut to the last ones.
_MAX_WINDOW, _KEPT_WINDOW = 32, 16


class TextDelta(Struct, frozen=True, gc=False):
    """The text that a push made certain."""

    text: str
    """Text that can be shown, following all text shown before."""
    stopped: bool = False
    """Whether a stop string was found. It and the text after it are cut, and later pushes are ignored."""


class TokenDecoder(Protocol):
    """The text of one sequence of tokens, without stop strings."""

    @property
    def has_begun(self) -> bool:
        """Whether there were tokens that are part of the text."""

    @property
    def is_open(self) -> bool:
        """Whether the text of the last tokens is not certain."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they make certain. O(tokens)."""

    def rest(self) -> str:
        """Return the text that is not certain yet, after the last token."""

    def shown(self, token_ids: Iterable[int]) -> Iterator[int]:
        """Yield the tokens that are part of the text, including those that complete no character."""


class Detokenizer:
    """Makes the decoders of one tokenizer. As thread-safe as the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads the bytes of all tokens, which takes a fraction of a second."""
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.specials = {str(token): token_id for token_id, token in added.items() if token.special}
        """Ids of the tokens that texts omit, by their own text."""
        self._bytes = TokenBytes.of(tokenizer)
        self._shown: dict[frozenset[str], TokenBytes] = {}

    def decoder(self, keep: Collection[str] = (), after: Sequence[int] = ()) -> TokenDecoder:
        """Create the decoder of one text, which omits all special tokens except `keep`.

        The text continues that of the tokens `after`; only their `context` counts. Without any, a new
        text begins.
        """
        kept = self._kept(keep)
        decoder = self._new(kept)
        context = _last_shown(decoder, after)
        # The context may begin inside a character; these tokens have its other bytes.
        for start in range(min(len(context), 1 + _MAX_OPEN)):
            decoder = self._new(kept)
            if not decoder.push(context[start:]).startswith(_REPLACEMENT):
                break
        return decoder

    def context(self, keep: Collection[str], after: Sequence[int]) -> list[int]:
        """Return the tokens of `after` on which the text that follows depends: the last that show text.

        O(1) in their number, unless most of them show none.
        """
        return _last_shown(self._new(self._kept(keep)), after)

    def _kept(self, keep: Collection[str]) -> frozenset[str]:
        return frozenset(self.specials.keys() & set(keep))

    def _new(self, kept: frozenset[str]) -> TokenDecoder:
        if self._bytes is None:
            # If the tokenizer does not list its special tokens, only its own `decode` knows them.
            return WindowDecoder(self._tokenizer, self._hidden(kept) if self.specials else None)
        if kept not in self._shown:
            self._shown[kept] = self._bytes.without(self._hidden(kept))
        return ByteDecoder(self._shown[kept])

    def _hidden(self, kept: frozenset[str]) -> frozenset[int]:
        return frozenset(self.specials[text] for text in self.specials.keys() - kept)


def _last_shown(decoder: TokenDecoder, token_ids: Sequence[int]) -> list[int]:
    """Return the last tokens that are part of the text."""
    return list(islice(decoder.shown(reversed(token_ids)), _CONTEXT))[::-1]


class TextStream:
    """The text of one request, built up token by token."""

    def __init__(
        self,
        decoder: TokenDecoder,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        includes_stop: bool = False,
    ) -> None:
        """The first of the strings `stop` ends the text, but none within the first `min_tokens` tokens."""
        self._decoder = decoder
        self._stop = sorted(stop)
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        """Number of tokens pushed, up to the one that completed a stop string."""
        self.includes_stop = includes_stop
        """Whether the stop string that ends the text is part of it."""
        self.stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the text. If several are complete: the one that begins first, the longest of
        these."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens. With stop strings they are added one by one, to find the token that completes one."""
        if self.stopped:
            return TextDelta("", stopped=True)
        if not self._stop:
            self.num_tokens += len(token_ids)
            return TextDelta(self._decoder.push(token_ids))
        shown = []
        for token in token_ids:
            self.num_tokens += 1
            shown.append(self._show(self._decoder.push([token])))
            if self.stopped:
                break
        return TextDelta("".join(shown), self.stopped)

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return ""
        rest, self._held = self._held + self._decoder.rest(), ""
        return rest

    def _show(self, text: str) -> str:
        """Return the part of the held text and `text` that can be shown now.

        Searches once for each stop string, only where it would end in the new text. A character is skipped once,
        when no stop string begins with it and the text after it, so that holding costs O(1) look-ups per character
        of a text.
        """
        if self.num_tokens < self._min_tokens:
            return text
        num_held, text = len(self._held), self._held + text
        ends = [
            (found, -len(string), string)
            for string in self._stop
            if (found := text.find(string, max(0, num_held + 1 - len(string)))) >= 0
        ]
        if ends:
            self.stopped = True
            self._held = ""
            end, _, self.stop_string = min(ends)
            return text[: end + len(self.stop_string)] if self.includes_stop else text[:end]
        split = 0
        while split < len(text) and not self._may_begin(text[split:]):
            split += 1
        self._held = text[split:]
        return text[:split]

    def _may_begin(self, text: str) -> bool:
        """Whether a stop string begins with `text`: if any does, so does the first in order that is not less."""
        at = bisect_left(self._stop, text)
        return at < len(self._stop) and self._stop[at].startswith(text)


class ByteDecoder:
    """Joins the bytes of tokens; only the bytes of an open character wait.

    A byte that belongs to no character becomes a mark and leaves its neighbours readable.
    """

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._open = b""
        self.has_begun = False

    @property
    def is_open(self) -> bool:
        """Whether a character is not complete."""
        return bool(self._open)

    def shown(self, token_ids: Iterable[int]) -> Iterator[int]:
        """Yield the tokens that are part of the text."""
        return filter(self._table.by_id.get, token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they make certain."""
        data = self._open + self._table.join(token_ids)
        if not self.has_begun and data:
            self.has_begun = True
            data = data.removeprefix(b" ") if self._table.strips_space else data
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._open = data[num_read:]
        return text

    def rest(self) -> str:
        """Return a mark instead of an open character."""
        return self._open.decode(errors="replace")


class WindowDecoder:
    """Decodes the last tokens together, for tokenizers whose tokens' bytes are not known.

    ids:     [ dropped | context: decoded too, for its spaces | new: decoded again until it is complete ]
                       ^ window_start                        ^ whole_end
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[int] | None = None) -> None:
        """Omit the tokens `hidden`; None means all special tokens."""
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids: list[int] = []
        self._window_start = 0
        self._whole_end = 0
        self._shown = ""  # the part of the window's text that was passed on
        self.is_open = False

    @property
    def has_begun(self) -> bool:
        """Whether there were tokens that are part of the text."""
        return bool(self._ids)

    def shown(self, token_ids: Iterable[int]) -> Iterator[int]:
        """Yield the tokens that are part of the text."""
        if self._hidden is None:
            return (token for token in token_ids if self._text([token]))
        return filterfalse(self._hidden.__contains__, token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they make certain."""
        hidden, num_before = self._hidden or (), len(self._ids)
        self._ids += [token for token in token_ids if token not in hidden]
        window = self._window_text()
        if self._whole_end > self._window_start and not window.startswith(self._shown):
            # Some tokenizers mark all bytes of a run as broken while its last character is open.
            self._window_start, self._shown = self._whole_end, ""
            window = self._window_text()
        num_open = min(len(window) - len(window.rstrip(_REPLACEMENT)), _MAX_OPEN)
        if num_open and len(token_ids) > 1:  # the beginning of such a run is found token by token
            del self._ids[num_before:]
            return "".join([self.push([token]) for token in token_ids])
        certain = window[len(self._shown) : len(window) - num_open]
        self._shown += certain
        self.is_open = num_open > 0
        if num_open == 0 and not certain:
            if self._shown or num_before > _KEPT_WINDOW:
                del self._ids[num_before:]  # A token without text gives no context.
        elif num_open == 0:
            if context := self._text(self._ids[self._whole_end :]):  # else the next word would count as the first
                self._window_start, self._whole_end, self._shown = self._whole_end, len(self._ids), context
        elif len(self._ids) - self._window_start > _MAX_WINDOW:
            self._shorten(window[len(window) - num_open :])
        return certain

    def rest(self) -> str:
        """Return the text that is not certain yet, after the last token."""
        return self._window_text()[len(self._shown) :]

    def _shorten(self, open_end: str) -> None:
        """Keep only the window's last tokens. A cut inside a character changes only the text next to it, so enough
        other text must be between the cut and `open_end`.
        """
        start = len(self._ids) - _KEPT_WINDOW
        text = self._text(self._ids[start:])
        if text.endswith(open_end) and len(text) > 2 * _MAX_OPEN:
            self._window_start = self._whole_end = start
            self._shown = text.removesuffix(open_end)

    def _window_text(self) -> str:
        return self._text(self._ids[self._window_start :])

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._hidden is None) if token_ids else ""
