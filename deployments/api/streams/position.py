"""A position in a stream: the id of its last event that the client has.

    id: chatcmpl-0123…ef:6759a1b2:12.7:1.2.1:89abcdef
        NAME             CREATED  COUNTS     CHECK
                                       I.D.J

COUNTS are the tokens of each choice that were read when the event was made, empty for a choice without any. The
event is the J-th of the group that the last D tokens of choice I made; if I is the number of choices, of the group
that ends the stream. So a position says how many tokens of an answer to feed again, and which of the events are
new. CHECK depends on the tenant, the prompts and the tokens up to there (`EventIds`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.api.base.errors import ApiError, invalid, quoted
from deployments.api.output.response_encoder import AnswerName

MOST_CHOICES = 128
"""Most choices of a resumable stream, as each has a number in every id."""
_NAME, _COUNT = r"[a-z]{1,16}[-_][0-9a-f]{24,32}", r"\d{1,10}"
_FORM = re.compile(
    rf"({_NAME}):([0-9a-f]{{1,10}}):"
    rf"((?:{_COUNT})?(?:\.(?:{_COUNT})?){{0,{MOST_CHOICES - 1}}}):"
    rf"(\d{{1,3}})\.({_COUNT})\.({_COUNT}):([0-9a-f]{{8}})"
)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Where a client stopped reading."""

    text: str
    """The id itself."""
    name: AnswerName
    counts: Sequence[int | None]
    """Tokens of each choice before and in the event's group; None for a choice that had no event."""
    choice: int
    """The choice of the event's group; the number of choices for the group that ends the stream."""
    num_last: int
    """Tokens of which the group was made."""
    event: int
    """Number of the event in its group, from 1."""
    check: int

    @classmethod
    def parse(cls, text: str) -> StreamPosition:
        """Read the id of an event. Raises `ApiError` 400."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise wrong_id(f"Last-Event-ID is not the id of an event from this server: {quoted(text)}.")
        name, created, counts, choice, num_last, event, check = found.groups()
        position = cls(
            text,
            AnswerName(name, int(created, 16)),
            [int(count) if count else None for count in counts.split(".")],
            int(choice),
            int(num_last),
            int(event),
            int(check, 16),
        )
        if not position._is_possible:
            raise wrong_id("Last-Event-ID has numbers that contradict each other, so no stream has sent it.")
        return position

    @property
    def at_end(self) -> bool:
        """Whether the event is of the group that ends the stream."""
        return self.choice == len(self.counts)

    @property
    def _is_possible(self) -> bool:
        if self.event == 0 or self.choice > len(self.counts):
            return False
        if self.at_end:
            return self.num_last == 0
        return (count := self.counts[self.choice]) is not None and self.num_last <= count


def is_stream_name(given: str) -> bool:
    """Whether a stream could have this name."""
    return re.fullmatch(_NAME, given) is not None


def wrong_id(message: str) -> ApiError:
    """Create the 400 for a Last-Event-ID that no stream of the request can have sent."""
    return invalid(message, "Last-Event-ID", "invalid_last_event_id")
