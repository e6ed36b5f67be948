"""Turns token ids into text as early as it is certain, for streams and for the offline API alike.

Text has to wait for two reasons. A character may be spelled by several tokens, so the text of the last ones is not
final while it ends in a replacement character. And text that could be the beginning of a stop string is held back
until it is known whether it is one.

    ids:     [ dropped | context: decoded too, for its spaces | new: decoded again until it is complete ]
                       ^ window_start                        ^ whole_end
    text:    [ emitted | held: may be the beginning of a stop string ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most this many replacement characters may still become another one.
_MAX_OPEN = 3
# Bytes that never become a character keep the window open, so a window with more tokens is cut to the last ones.
_MAX_WINDOW, _KEPT_WINDOW = 32, 16


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that a push made certain."""

    text: str
    """Text that can be shown, following all text shown before."""
    stopped: bool = False
    """Whether a stop string was found; it and what follows it are cut, and later pushes are ignored."""


class TextStream:
    """The text of one request, built up token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._window_start = 0
        self._whole_end = 0
        self._num_shown = 0  # characters of the window's text that were passed on
        self._held = ""
        self.num_tokens = 0
        """Number of tokens pushed, up to the one that completed a stop string."""
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens; O(tokens). With stop strings they are taken one by one, to know which one completes one."""
        if self.stopped:
            return TextDelta("", stopped=True)
        steps = [[token] for token in token_ids] if self._stop else [list(token_ids)]
        shown = []
        for step in steps:
            self.num_tokens += len(step)
            shown.append(self._show(self._decode(step)))
            if self.stopped:
                break
        return TextDelta("".join(shown), self.stopped)

    def finish(self) -> str:
        """Return the text that was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest, self._held = self._held + self._window_text()[self._num_shown :], ""
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        """Return the text that `token_ids` make certain."""
        self._ids += token_ids
        window = self._window_text()
        num_open = min(len(window) - len(window.rstrip(_REPLACEMENT)), _MAX_OPEN)
        certain = window[self._num_shown : len(window) - num_open]
        self._num_shown += len(certain)
        if num_open == 0:
            self._window_start, self._whole_end = self._whole_end, len(self._ids)
            self._num_shown = len(self._window_text())
        elif len(self._ids) - self._window_start > _MAX_WINDOW:
            self._shorten(window[len(window) - num_open :])
        return certain

    def _shorten(self, open_end: str) -> None:
        """Keep only the window's last tokens. A cut inside a character changes only the text next to it, so enough
        other text must lie between the cut and `open_end`.
        """
        start = len(self._ids) - _KEPT_WINDOW
        text = self._text(self._ids[start:])
        if text.endswith(open_end) and len(text) > 2 * _MAX_OPEN:
            self._window_start = self._whole_end = start
            self._num_shown = len(text) - len(open_end)

    def _window_text(self) -> str:
        return self._text(self._ids[self._window_start :])

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special) if token_ids else ""

    def _show(self, text: str) -> str:
        """Return the part of the held text and `text` that can be shown now."""
        if not self._stop or self.num_tokens < self._min_tokens:
            return text
        self._held += text
        ends = [found for string in self._stop if (found := self._held.find(string)) >= 0]
        if ends:
            self.stopped = True
            shown, self._held = self._held[: min(ends)], ""
            return shown
        keep = max(_overlap(self._held, string) for string in self._stop)
        split = len(self._held) - keep
        shown, self._held = self._held[:split], self._held[split:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
