"""The offline API, which turns prompts into texts in this process.

from engine import LLM, SamplingParams
llm = LLM("demo")
print(llm.chat([{"role": "user", "content": "What does itertools.chain do?"}])[0].text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from engine.base.errors import QueueFull
from engine.base.suggestions import unknown_setting
from engine.model_config.tasks import check_task
from engine.program.engine import Engine, model_directory
from engine.settings.config import GPU_DEFAULTS, EngineConfig
from engine.text.detokenizer import Detokenizer, TextStream
from engine.text.tokenizer import load_tokenizer
from engine.values.beam_search import Hypothesis
from engine.values.embedding import Vector, embedding, values_of
from engine.values.logprobs import PackedLogprobs, TokenLogprobs, joined
from engine.values.pooling import Pooling
from engine.values.sampling_params import SamplingParams
from engine.values.stream_delta import FinishReason, StreamDelta

PromptInput = str | Sequence[int]
"""A prompt as text or as token ids."""
ChatTurn = dict[str, str]
"""A message of a conversation, with `role` and `content`."""

_THROUGHPUT: dict[str, Any] = {"max_step_ms": None, "max_step_stretch": None}
"""Defaults that differ from an engine's: without readers of a stream, inter-token latency needs no bound."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    """Generated ids, including the stop token that ended them."""
    text: str
    """Generated text, without special tokens and without the stop string that ended it."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""
    logprobs: list[TokenLogprobs]
    """One per generated token if asked for, else empty."""
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One per prompt token if asked for, else empty; None for the first, which nothing precedes."""
    score: float | None = None
    """Score of a beam search's result: sum of log-probabilities / length ** length_penalty."""
    alternatives: list[RequestOutput] = field(default_factory=list)
    """Further results of a beam search, best first."""


class LLM:
    """A model that generates. Raises ModelLoadError if it cannot be loaded, ValueError for an invalid setting."""

    def __init__(self, model: str = "demo", *, engine: Engine | None = None, **settings: Any) -> None:
        """`settings` are the fields of `EngineConfig`: dtype, page_size, kv_pages, max_model_len, ... The bounds
        on a step's length, which exist for streams, are off unless they are given; on a GPU, steps are longer and
        KV takes more of the memory (`engine.settings.config.GPU_DEFAULTS`).
        """
        if message := unknown_setting(settings, EngineConfig.__dataclass_fields__):
            raise ValueError(message)
        self.engine = engine or Engine.from_config(
            EngineConfig(model=model, **{**_defaults(settings), **settings})
        )
        self.tokenizer = load_tokenizer(model_directory(self.engine.config))
        self._detokenizer = Detokenizer(self.tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text or token ids; returns one output for each, in order.

        Raises ValueError, such as NeverFits, before anything runs if a prompt cannot be served.
        """
        return self._generate(_as_batch(prompts), params, progress, continues_text=True)

    def _generate(
        self,
        batch: list[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        *,
        continues_text: bool,
    ) -> list[RequestOutput]:
        many = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(many) != len(batch):
            raise ValueError(f"got {len(batch)} prompts and {len(many)} sampling params: expected one each")
        jobs = [
            self._job(prompt, param, continues_text=continues_text)
            for prompt, param in zip(batch, many, strict=True)
        ]
        self._run(jobs, progress)
        return [job.output() for job in jobs]

    def chat(
        self,
        conversations: Sequence[ChatTurn] | Sequence[Sequence[ChatTurn]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of role/content messages), rendered with the model's chat template."""
        if conversations and isinstance(conversations[0], dict):
            conversations = cast("Sequence[Sequence[ChatTurn]]", [conversations])
        prompts = [
            self.tokenizer.apply_chat_template(
                cast("Sequence[ChatTurn]", messages), add_generation_prompt=True, tokenize=False
            )
            for messages in conversations
        ]
        ids = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        return self._generate(
            list(ids), params or SamplingParams(temperature=0, max_tokens=256), progress, continues_text=False
        )

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        dimensions: int | None = None,
        normalizes: bool = True,
        progress: bool = False,
    ) -> list[Vector]:
        """Return an embedding of each prompt: the last token's hidden state, or the one that an encoder's files
        define, cut and scaled to length 1.

        Raises ValueError as `generate` does, and RuntimeError when the model computes no valid values.
        """
        params = SamplingParams(pooling=Pooling())
        jobs = [self._job(prompt, params) for prompt in _as_batch(prompts)]
        self._run(jobs, progress)
        return [embedding(job.pooled(), dimensions, normalizes=normalizes) for job in jobs]

    def close(self) -> None:
        """End the model's other ranks, if it has several; they end with this process anyway. Idempotent."""
        self.engine.close()

    def _job(
        self, prompt: PromptInput, params: SamplingParams, *, continues_text: bool = False
    ) -> _OfflineRequest:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_task(params, self.engine.tasks, is_encoder=self.engine.is_encoder)
        request = self.engine.new_request(f"offline-{self._num_requests}", ids, params)
        self._num_requests += 1
        self.engine.scheduler.check(request)

        def text_stream() -> TextStream:
            decoder = self._detokenizer.decoder(after=ids if continues_text else ())
            return TextStream(decoder, params.stop, min_tokens=params.min_tokens)

        return _OfflineRequest(request, text_stream)

    def _run(self, jobs: list[_OfflineRequest], progress: bool) -> None:
        from tqdm.auto import tqdm

        loop = self.engine.loop
        open_jobs = {job.request.request_id: job for job in jobs}
        waiting = deque(job.request for job in jobs)
        with tqdm(total=len(jobs), desc="Generating", unit="prompt", disable=not progress) as bar:
            while open_jobs:
                with suppress(QueueFull):  # The bounded queue is full: submit the rest as requests leave it.
                    while waiting:
                        self.engine.scheduler.add(waiting[0], loop.clock())
                        waiting.popleft()
                for event in loop.step():
                    job = open_jobs[event.request_id]
                    if job.take(event):
                        loop.abort(event.request_id)
                    if event.finish_reason is not None:
                        del open_jobs[event.request_id]
                        bar.update()
        while loop.has_work:  # Take in the step that was in flight when the last request ended.
            loop.step()


class _OfflineRequest:
    """A prompt and its output so far."""

    def __init__(self, request: Any, new_stream: Callable[[], TextStream]) -> None:
        self.request = request
        self._stream, self._new_stream = new_stream(), new_stream
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._scores: PackedLogprobs | None = None
        self._end: StreamDelta | None = None

    def take(self, event: StreamDelta) -> bool:
        """Add a delta's tokens; returns whether a stop string was found and the request should be aborted."""
        if event.finish_reason is not None:
            self._end = event
        self._scores = joined(self._scores, event.prompt_logprobs)
        if self._stream.stopped:
            return False
        before = self._stream.num_tokens
        delta = self._stream.push(event.text_ids)
        # A delta may hold tokens after the one that completed a stop string.
        count = self._stream.num_tokens - before if delta.stopped else len(event.token_ids)
        self._text.append(delta.text)
        self._token_ids += event.token_ids[:count]
        if event.logprobs is not None:
            self._logprobs += event.logprobs[:count]
        return delta.stopped and event.finish_reason is None

    def pooled(self) -> Vector:
        """Return the result of a pooled request. Raises RuntimeError if it failed."""
        assert self._end is not None
        if self._end.pooled is None:
            raise RuntimeError(self._end.error or "the request ended without a result")
        return values_of(self._end.pooled)

    def output(self) -> RequestOutput:
        """Return the result, after the last delta."""
        assert self._end is not None and self._end.finish_reason is not None
        output = RequestOutput(
            prompt_ids=list(self.request.prompt_ids),
            token_ids=self._token_ids,
            text="".join(self._text) + self._stream.finish(),
            finish_reason="stop" if self._stream.stopped else self._end.finish_reason,
            cached_tokens=self._end.num_cached,
            logprobs=self._logprobs,
            error=self._end.error,
            prompt_logprobs=self._prompt_logprobs(),
        )
        found = self._end.alternatives
        if not found:
            return output
        others = [self._alternative(output, hypothesis) for hypothesis in found[1:]]
        return replace(output, score=found[0].score, alternatives=others)

    def _alternative(self, best: RequestOutput, found: Hypothesis) -> RequestOutput:
        stream = self._new_stream()
        text = stream.push(found.text_ids).text
        return replace(
            best,
            token_ids=list(found.token_ids),
            text=text + stream.finish(),
            finish_reason=found.finish_reason,
            score=found.score,
        )

    def _prompt_logprobs(self) -> list[TokenLogprobs | None]:
        if self.request.sampling.prompt_logprobs is None:
            return []
        return [None, *(self._scores.read(self.request.prompt_ids[1:]) if self._scores is not None else ())]


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    from engine.loading.devices import device_named  # imports torch

    is_on_gpu = device_named(settings.get("device", EngineConfig().device)).type == "cuda"
    return {**_THROUGHPUT, **(GPU_DEFAULTS if is_on_gpu else {})}


def _as_batch(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Make a batch of a single prompt, which is a string or a non-empty list of ints."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptInput], prompts))
