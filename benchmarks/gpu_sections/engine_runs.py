"""A model in the engine: decodes, prompts, the offline workload, a shared prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import cast

from benchmarks.gpu_sections.drive import Trace, drive
from benchmarks.gpu_sections.limits import Limits
from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.timing import seconds_of
from benchmarks.gpu_sections.workload import Workload
from engine.attention.host_pages import HostKVPages
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.values.sampling_params import SamplingParams

_WARM_STEPS = 8
SAMPLED = SamplingParams(temperature=0.6)
AIMS: Mapping[tuple[str, str], float] = {
    ("llama-3.1-8b", "decode, 1 row"): 0.75,
    ("llama-3.1-8b", "decode, 32 rows"): 0.75,
    ("llama-3.1-8b", "decode, 128 rows"): 0.70,
    ("llama-3.1-8b", "prefill"): 0.75,
    ("qwen3-0.6b", "offline"): 0.60,
}
"""Shares of the limit that are aimed at on an H200."""


class Runs:
    """Sections of one model in one engine."""

    def __init__(self, model: str, engine: Engine, limits: Limits, workload: Workload) -> None:
        self._model, self._limits, self._work = model, limits, workload
        self.engine = self._engine = engine
        self._kv_tokens = engine.runner.num_pages * engine.config.page_size

    def warm_up(self) -> None:
        """Have a batch shrink from the most rows to one: what is compiled or captured for a size is there then."""
        most = min(self._work.requests, self._engine.config.max_running)
        drive(self._engine, [[row] for row in range(most)], [2 + row // 4 for row in range(most)], SAMPLED)

    def decode(self) -> Iterator[Measurement]:
        """Batches of rows in lockstep, the largest first: the others find their prompts in the cache."""
        work = self._work
        length = work.context - work.decoded // 2
        prompts = [work.prompt(row, length) for row in range(max(work.batches))]
        largest = self._kv_tokens // (length + work.decoded + self._engine.config.page_size)
        fitting = [rows for rows in work.batches if rows <= min(largest, self._engine.config.max_running)]
        for rows in sorted(set(work.batches) - set(fitting)):
            yield self._line(
                f"decode, {rows} rows", note=f"left out: KV for {largest} such rows fits into the memory"
            )
        for rows in reversed(fitting):
            if rows == fitting[-1]:
                drive(self._engine, prompts[:rows], [1] * rows)
            trace = drive(self._engine, prompts[:rows], [work.decoded] * rows)
            yield self.decoded(rows, trace)
        if fitting:
            yield self._cut_decodes(prompts[: fitting[len(fitting) // 2]])

    def _cut_decodes(self, prompts: Sequence[list[int]]) -> Measurement:
        """A middle batch again with top-p, for which the sampler is no part of the graph."""
        sampling = SamplingParams(temperature=0.6, top_p=0.9)
        line = self.decoded(
            len(prompts), drive(self._engine, prompts, [self._work.decoded] * len(prompts), sampling)
        )
        return replace(line, what=f"{line.what}, top-p 0.9", aim=None)

    def decoded(self, rows: int, trace: Trace, context: int | None = None) -> Measurement:
        """Return the time of a token of each row, while all rows decode after so much context, by default the
        workload's. In a pipeline, a step has some of the rows.
        """
        parts = self._engine.config.num_micro_batches
        together = [step for step in trace.steps if step[1] == rows]
        if parts > 1:  # until rows end, which is in the last steps
            together = [step for step in trace.steps if step[0] > max(trace.first)][:-parts]
        together = together[_WARM_STEPS:]
        if len(together) < 2:
            return self._line(f"decode, {rows} rows", note="left out: its rows never decoded together")
        taken = together[-1][0] - together[0][0]
        step = rows * taken / sum(tokens for _, tokens in together[1:])
        what = f"decode, {rows} row{'s' * (rows > 1)}"
        least = partial(Limits.decode, rows=rows, kv_tokens=rows * (context or self._work.context))
        return self._line(what, tokens_per_s=rows / step, seconds=step, least=least)

    def prefill(self) -> Iterator[Measurement]:
        """Single prompts, nothing of them cached: until their first token."""
        for length in self._work.prefills:
            if length + self._engine.config.page_size > self._kv_tokens:
                yield self._line(f"prefill, {length}", note=f"left out: KV for {self._kv_tokens} tokens fits")
                continue
            first, *seconds = [
                drive(self._engine, [self._work.prompt(-(100 * length + again), length)], [1]).first[0]
                for again in range(self._work.repeats + 1)
            ]
            taken = median(seconds)
            yield self._line(
                f"prefill, {length}",
                tokens_per_s=length / taken,
                seconds=taken,
                least=partial(Limits.prefill, start=0, end=length),
                aim="prefill",
                note=f"the first of this length took {first / taken:.2f} times as long",
            )

    def mixed(self) -> Iterator[Measurement]:
        """Prompts that come together, and the same next to requests that decode."""
        work, engine = self._work, self._engine
        total = work.burst * work.burst_length
        what = f"{work.burst} prompts of {work.burst_length}"
        for again in range(2):  # The first one compiles.
            trace = drive(engine, self._burst(again), [1] * work.burst)
        least = partial(Limits.prefills, lengths=[work.burst_length] * work.burst)
        yield self._line(
            f"{what} together", tokens_per_s=total / trace.seconds, seconds=trace.seconds, least=least
        )
        decodes = [work.prompt(5 * 10**6 + row, work.suffix) for row in range(work.decoding)]
        drive(engine, decodes, [1] * work.decoding)
        rows, gap = work.decoding, work.steps_before
        many = gap + work.steps_beside
        prompts, outputs = decodes + self._burst(2), [many] * rows + [1] * work.burst
        trace = drive(engine, prompts, outputs, arrivals=[0] * rows + [gap] * work.burst)
        began, ended = trace.arrived[rows], max(trace.first[rows:])
        times = [at for at, count in trace.steps if count >= 1 and began <= at <= ended]
        worst = max((after - before for before, after in pairwise([began, *times])), default=0.0)
        yield self._line(
            f"{what} next to {rows} decodes",
            tokens_per_s=total / (ended - began),
            seconds=ended - began,
            least=least,
            note=f"longest time between two steps {1000 * worst:.1f} ms",
        )

    def _burst(self, number: int) -> list[list[int]]:
        work = self._work
        return [work.prompt(6 * 10**6 + 1000 * number + at, work.burst_length) for at in range(work.burst)]

    def long(self) -> Iterator[Measurement]:
        """A prompt as long as a context may be, a second one, and decodes after it."""
        work, length = self._work, self._work.long
        for number, name in enumerate(("first", "second")):
            prompt = work.prompt(7 * 10**6 + number, length)
            taken = drive(self._engine, [prompt], [1]).first[0]
            least = partial(Limits.prefill, start=0, end=length)
            yield self._line(f"long, {name} of {length}", tokens_per_s=length / taken, seconds=taken, least=least)
        for rows in (1, 4):
            trace = drive(self._engine, [prompt] * rows, [work.long_decoded] * rows)
            line = self.decoded(rows, trace, length)
            yield replace(line, what=f"long, {line.what} after {length}", aim=None)

    def copies(self) -> Iterator[Measurement]:
        """Pages to host memory and back, to neighbours there and to places of their own."""
        pages = cast(ModelRunner, self._engine.runner).pages
        count = min(self._work.copied, pages.num_pages)
        host = HostKVPages(pages, 2 * count)
        for stride, name in ((1, "neighbours"), (2, "single pages")):
            pairs = [(page, stride * page) for page in range(count)]
            for way, copy in (("out", host.copy_out), ("in", host.copy_in)):
                seconds = seconds_of(partial(copy, pairs), pages.data.device, calls=2)
                rate = count * host.page_bytes / seconds / 1e9
                note = f"{rate:.1f} GB/s (aim: 40 on PCIe 5.0)"
                yield self._line(f"copies {way}, {count} {name}", seconds=seconds, note=note)

    def host(self) -> Iterator[Measurement]:
        """A long prompt; another, for which its KV goes to host memory; and the first one again, from there."""
        length = self._work.long
        for what, number in (("first", 0), ("another", 1), ("first again", 0)):
            trace = drive(self._engine, [self._work.prompt(8 * 10**6 + number, length)], [1])
            taken, cached = trace.first[0], trace.cached[0]
            yield self._line(
                f"host memory, {what} of {length}",
                tokens_per_s=length / taken,
                seconds=taken,
                least=partial(Limits.prefill, start=cached, end=length),
                note=f"{cached} tokens cached",
            )

    def offline(self) -> Iterator[Measurement]:
        """The workload of nano-vllm and mini-sglang: output tokens over all the time it takes."""
        self.warm_up()
        offline = self._work.offline()
        trace = drive(self._engine, offline.prompts, offline.outputs, SAMPLED)
        total, lengths = sum(offline.outputs), [len(prompt) for prompt in offline.prompts]
        yield self._line(
            f"offline, {len(offline.outputs)} requests",
            tokens_per_s=total / trace.seconds,
            seconds=trace.seconds,
            least=partial(Limits.offline, prompts=lengths, outputs=offline.outputs),
            aim="offline",
            note=f"{total} output tokens",
        )

    def prefix(self) -> Iterator[Measurement]:
        """A long prefix and a short question: the first token of the first request, and of the next one."""
        size, cached = self._work.prefix, 0
        cold: list[float] = []
        warm: list[float] = []
        for again in range(self._work.repeats + 1):
            shared = self._work.prompt(10**6 + again, size)
            for times, number in ((cold, 1), (warm, 2)):
                question = self._work.prompt(2 * 10**6 + 10 * again + number, self._work.suffix)
                trace = drive(self._engine, [shared + question], [1])
                times.append(trace.first[0])
            cached = trace.cached[0]
        end = size + self._work.suffix
        for name, times, start in (("cold", cold[1:], 0), ("warm", warm[1:], cached)):
            taken = median(times)
            yield self._line(
                f"prefix, {name}",
                tokens_per_s=end / taken,
                seconds=taken,
                least=partial(Limits.prefill, start=start, end=end),
                note=f"{start} of {end} tokens cached",
            )

    def _line(
        self,
        what: str,
        *,
        tokens_per_s: float | None = None,
        seconds: float | None = None,
        least: Callable[[Limits], float] | None = None,
        aim: str | None = None,
        note: str = "",
    ) -> Measurement:
        shares = {} if seconds is None or least is None else self._limits.shares(least, seconds)
        return Measurement(
            what,
            self._model,
            tokens_per_s=tokens_per_s,
            ms=None if seconds is None else 1000 * seconds,
            **shares,
            aim=AIMS.get((self._model, aim or what)),
            note=note,
        )
