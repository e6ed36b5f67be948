"""Puts an id before each event of a stream (`position` explains them)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from zlib import crc32

from deployments.api.output.response_encoder import AnswerName
from deployments.api.streams.position import StreamPosition

_32_BITS = 0xFFFFFFFF


class EventIds:
    """The tokens of one stream that were read so far, and the ids of its events."""

    def __init__(self, name: AnswerName, tenant: str, prompts: Sequence[Sequence[int]], num_choices: int) -> None:
        """`prompts` are token ids, each with `num_choices` choices."""
        self._prefix = b"id: %b:%x:" % (name.id.encode(), name.created)
        of_prompts = [crc32(_packed(prompt)) for prompt in prompts]
        keys = [(tenant, index, of_prompts[index // num_choices]) for index in range(len(prompts) * num_choices)]
        self._checks = [crc32(repr(key).encode()) for key in keys]
        # Choices are read in any order, so their checks are added. With XOR, equal changes in two would cancel.
        self._check = sum(self._checks) & _32_BITS
        self._counts: list[int | None] = [None] * len(keys)
        self._texts = [b""] * len(keys)

    def read(self, choice: int, token_ids: Sequence[int]) -> None:
        """Count the tokens of a group."""
        self._counts[choice] = count = (self._counts[choice] or 0) + len(token_ids)
        self._texts[choice] = b"%d" % count
        before = self._checks[choice]
        data = token_ids[0].to_bytes(4, "little") if len(token_ids) == 1 else _packed(token_ids)
        after = self._checks[choice] = crc32(data, before)
        self._check = (self._check + after - before) & _32_BITS

    def named(self, events: bytes, choice: int, num_tokens: int) -> bytes:
        """Return the events of a group with their ids. The group was made of the last tokens of a choice."""
        counts = self._texts[0] if len(self._texts) == 1 else b".".join(self._texts)
        if events.find(b"\n\n") == len(events) - 2:
            return b"%b%b:%d.%d.1:%08x\n%b" % (self._prefix, counts, choice, num_tokens, self._check, events)
        head, tail = b"%b%b:%d.%d." % (self._prefix, counts, choice, num_tokens), b":%08x\n" % self._check
        each = events.split(b"\n\n")[:-1]  # JSON has no line breaks, so only the ends of events match.
        return b"".join([b"%b%d%b%b\n\n" % (head, at, tail, event) for at, event in enumerate(each, 1)])

    def is_at(self, position: StreamPosition) -> bool:
        """Whether the tokens read are those that the client had at this position."""
        return self._counts == position.counts and self._check == position.check


def after(events: bytes, num_events: int) -> bytes | None:
    """Return the events of a group without the first ones; None if it has fewer."""
    each = events.split(b"\n\n")
    if num_events >= len(each):
        return None
    return b"\n\n".join(each[num_events:])


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
