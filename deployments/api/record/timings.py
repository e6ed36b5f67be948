"""The object `timings`: where a request's time went and what was computed for it, for clients that request it.

A body with `"include_timings": true` gets it next to `usage`; a stream in its last event before [DONE], which has
no choices: the usage event where there is one, else a separate event. A value that was not measured is null.

    arrival ── admission ─▶ routed ─▶ engine: queue │ prefill │ decode ─▶ end
               ╰──────── queue_s = admission_s + the engine's ─╯

Durations on different machines are by their own clocks. A stream that migrated sums its parts; its pauses, like
tokenizing, routing and the network, are only in `total_s`. With several choices the object covers all of them:
tokens and events are sums, `time_to_first_token_s` is that of the first choice to begin, the other seconds and
`replica` are those of the choice that ended last, and `choices` has each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from deployments.api.output.choice import Choice
from deployments.api.output.response_encoder import EncodedPrompt
from deployments.api.record.request_record import ChoiceTimes, GenerationStart, RequestRecord
from deployments.client.timeline import Timeline
from engine.values.stream_delta import Timings

Number = TypeVar("Number", int, float)


class RequestTimings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Timings of a request, or of one of its choices. Seconds are rounded to microseconds."""

    total_s: float
    """Time from the request's arrival to the last token, read at the client's pace."""
    time_to_first_token_s: float | None
    """Time from the request's arrival to the first token; null when there was none."""
    admission_s: float | None
    """Wait in the ingress for an engine with room."""
    queue_s: float | None
    """Total wait: in the ingress, and in engines from arrival to admission."""
    prefill_s: float | None
    """Time in engines from admission to the first token."""
    decode_s: float | None
    """Time in engines from the first token to the last."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in the first replica's cache."""
    recomputed_tokens: int | None
    """Tokens computed again, after a preemption or at another replica after a loss. Null for a tenant whose cache
    others share, because tokens that need no computation may be theirs."""
    output_tokens: int
    preemptions: int | None
    """Number of times it was preempted."""
    kv_pages_peak: int | None
    """Most KV pages held in an engine at any time, shared pages included."""
    migrations: int
    """Number of times its replica was lost after the first token."""
    replica: str | None
    """The engine replica that generated the last token."""
    choices: list[RequestTimings] | None = None
    """Timings of each choice, if there are several."""


def timings_of(record: RequestRecord) -> RequestTimings:
    """Return the timings known so far; a request that generated nothing has only its total."""
    now = record.now()
    start = record.generation
    timelines = [] if start is None else start.choices.timelines
    if start is None or not timelines:
        total, none = _seconds(now - record.arrival), None
        prompt = start.answer.num_prompt_tokens if start else 0
        return RequestTimings(total, none, none, none, none, none, prompt, 0, none, 0, none, none, 0, none)
    firsts = [start.choices.choices_of(index)[0] for index in range(len(timelines))]
    pairs = zip(firsts, timelines, strict=True)
    each = [_of_choice(record, start, choice, timeline, now) for choice, timeline in pairs]
    return each[0] if len(start.choices.choices) == 1 else _of_all(record, start, each, now)


def _of_choice(
    record: RequestRecord, start: GenerationStart, choice: Choice, timeline: Timeline, now: float
) -> RequestTimings:
    spans, times = timeline.spans, record.choice_times.get(choice.index, ChoiceTimes())
    admission, queued = timeline.sent_at - timeline.asked_at, _summed(timeline, lambda timings: timings.queue)
    return RequestTimings(
        total_s=_seconds((times.ended_at or now) - record.arrival),
        time_to_first_token_s=None if times.first_at is None else _seconds(times.first_at - record.arrival),
        admission_s=_seconds(admission),
        queue_s=None if queued is None else _seconds(admission + queued),
        prefill_s=_rounded(_summed(timeline, lambda timings: timings.prefill)),
        decode_s=_rounded(_sum(span.decode_s for span in spans)),
        prompt_tokens=len(_prompt_of(start, choice).token_ids),
        cached_tokens=choice.num_cached,
        recomputed_tokens=_summed(timeline, lambda timings: timings.num_recomputed)
        if choice.tells_cache
        else None,
        output_tokens=choice.num_generated,
        preemptions=_summed(timeline, lambda timings: timings.num_preemptions),
        kv_pages_peak=_most(span.timings.kv_pages_peak for span in spans if span.timings is not None),
        migrations=len(timeline.migrations),
        replica=spans[-1].replica if spans else None,
    )


def _prompt_of(start: GenerationStart, choice: Choice) -> EncodedPrompt:
    """Return a choice's prompt. Choices include candidates that were not among the best."""
    prompts = start.answer.prompts
    return prompts[choice.index * len(prompts) // len(start.choices.choices)]


def _of_all(
    record: RequestRecord, start: GenerationStart, each: list[RequestTimings], now: float
) -> RequestTimings:
    usage = start.answer.usage(start.choices.choices)
    firsts = [one.time_to_first_token_s for one in each if one.time_to_first_token_s is not None]
    return msgspec.structs.replace(
        max(each, key=lambda one: one.total_s),
        total_s=_seconds(now - record.arrival),
        time_to_first_token_s=min(firsts, default=None),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        recomputed_tokens=_sum(one.recomputed_tokens for one in each),
        output_tokens=usage["completion_tokens"],
        preemptions=_sum(one.preemptions for one in each),
        kv_pages_peak=_most(one.kv_pages_peak for one in each),
        migrations=sum(one.migrations for one in each),
        choices=each,
    )


def _summed(timeline: Timeline, read: Callable[[Timings], Number]) -> Number | None:
    """Sum a timing over all engines that ran the stream."""
    return _sum(None if span.timings is None else read(span.timings) for span in timeline.spans)


def _sum(values: Iterable[Number | None]) -> Number | None:
    """Return the sum; None when there are no values or one is unknown."""
    total: Number | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def _most(values: Iterable[int | None]) -> int | None:
    """Return the maximum of the known values; None when none is known."""
    return max((value for value in values if value is not None), default=None)


def _seconds(value: float) -> float:
    return round(value, 6)


def _rounded(value: float | None) -> float | None:
    return None if value is None else _seconds(value)
