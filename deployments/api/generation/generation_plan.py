"""The plan of an answer, from which requests to engines and parsers of their output are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex

from starlette.requests import Request
from starlette.responses import Response

from deployments.admission.rate_limits import Ticket
from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.api.http.body_memory import BodyRoom
from deployments.api.output.output_parser import PLAIN_TEXT, OutputParser, OutputParseSpec
from deployments.api.output.response_encoder import AnswerName, EncodedPrompt, ResponseContext, ResponseEncoder
from deployments.api.output.spelled_text import SpelledText
from deployments.api.sampling.parameters import at_most_tokens, for_choice
from deployments.api.sampling.prompt_scores import PromptScores
from deployments.api.served.served_model import ServedModel
from deployments.api.streams.asked import AskedStream
from deployments.api.streams.position import MOST_CHOICES
from deployments.client.protocol import GenerateRequest
from deployments.config.tenants import Tenant
from engine.values.sampling_params import SamplingParams

OnEnd = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
"""Receives the encoded end of an answer before it is sent, and returns the bytes to send instead."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A validated request: what to generate, with which model, and how to encode the answer."""

    served: ServedModel
    request: ChatRequest | CompletionRequest
    sampling: SamplingParams
    encoder: ResponseEncoder
    num_candidates: int = 1
    """Number of candidates to generate for each prompt; the answer has `encoder.context.num_choices` of them."""
    parse_spec: OutputParseSpec = PLAIN_TEXT
    """Reasoning and tool calls that the generated text is parsed for."""
    continues_text: bool = False
    """Whether the generated text continues that of the prompt. A new message of a conversation does not: it begins
    without the space that SentencePiece tokenizers put before a text's first word. So `transformers` decodes an
    answer, and templates that put a space before a message make the same tokens of it in a later turn."""
    echoes_only: bool = False
    """Answer with the prompts and generate nothing."""
    scores: PromptScores | None = None
    """Collector of the prompts' log-probabilities; None when none were requested."""
    scores_only: bool = False
    """Answer with the prompts' log-probabilities and generate nothing."""
    cuts_answers: bool = False
    """Whether each answer has at most as many tokens as its prompt leaves room for in the context."""
    later: Callable[[Request, Ticket], Awaitable[Response]] | None = None
    """Answers immediately and has the answer generated afterwards; None: it is generated now."""
    count_field: str | None = None
    """The field that asks for so many generations; None: `n`, or `best_of`."""
    on_end: OnEnd | None = None
    held: BodyRoom | None = None
    """Where `num_held` bytes of the request count for as long as its answer takes; None: it holds nothing."""
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints from a request's headers."""

    session_id: str | None = None
    """x-session-id: requests with the same id probably share prefixes."""
    explains: bool = False
    """x-raydix-explain: the answer explains the choice of its replica."""
    max_wait_s: float | None = None
    """x-max-wait-s: the longest wait for an engine that is of use to the client, in seconds."""
    address: str = ""
    """Not a header: the client's address, where there are no tenants."""
    is_deferrable: bool = False
    """Not a header: whether a batch sent it, so that it gives way to all requests of clients."""


def _priority(request: ChatRequest | CompletionRequest) -> int:
    if request.priority is None and request.service_tier is not None:
        return -1 if request.service_tier == "priority" else 1
    return request.priority or 0


def reported_stops(plan: GenerationPlan) -> Collection[int]:
    """Return the tokens that can be an answer's `stop_reason`: requested ones that are not the model's own end."""
    ids = plan.sampling.stop_token_ids
    if not ids or plan.sampling.ignore_eos:
        return ids
    return [token for token in ids if token not in plan.served.card.eos_token_ids]


def is_resumable(plan: GenerationPlan) -> bool:
    """Whether a stream can be continued after any event. One without generated text cannot, nor one with
    log-probabilities of its prompts, which are held until they are complete.
    """
    answer = plan.encoder.context
    num_choices = len(answer.prompts) * plan.num_candidates
    is_text = not plan.echoes_only and plan.scores is None and plan.sampling.pooling is None
    return bool(plan.request.stream) and is_text and num_choices <= MOST_CHOICES


def engine_requests(
    plan: GenerationPlan, hints: Hints, tenant: Tenant, stream: AskedStream | None = None
) -> list[tuple[GenerateRequest, list[OutputParser]]]:
    """Return one generation for each candidate of each prompt; candidate i has the same seed for all prompts. A
    beam search is one generation with all choices of its prompt. `stream` makes them resumable.
    """
    request, sampling, answer, count = plan.request, plan.sampling, plan.encoder.context, plan.num_candidates
    if stream is not None and request.seed is None:
        sampling = replace(sampling, seed=stream.seed)
    num_texts = 1
    if sampling.beams is not None:
        count, num_texts = 1, answer.num_choices
    if count > answer.num_choices:  # Candidates are ranked by log-probability.
        sampling = replace(sampling, logprobs=sampling.logprobs or 0)
    keep = None if request.skip_special_tokens is False else plan.parse_spec.marks
    codec = plan.served.codec
    contexts = [codec.context(keep, prompt.token_ids) if plan.continues_text else [] for prompt in answer.prompts]
    # A replica that still knows a request's first attempt would not run it again under the same id.
    again = f"-{token_hex(4)}" if stream is not None and stream.is_continued else ""
    asked: list[tuple[GenerateRequest, list[OutputParser]]] = []
    for index in range(len(answer.prompts) * count):
        prompt_ids = answer.prompts[index // count].token_ids
        left = plan.served.card.max_model_len - len(prompt_ids)
        generate = GenerateRequest(
            request_id=f"{answer.id}-{index}{again}",
            model=plan.served.name,
            prompt_ids=prompt_ids,
            sampling=for_choice(at_most_tokens(sampling, left) if plan.cuts_answers else sampling, index % count),
            priority=_priority(request),
            salt=tenant.salt(request.cache_salt or ""),
            session_id=hints.session_id or request.prompt_cache_key,
            tenant=tenant.name,
            address=hints.address,
            is_deferrable=hints.is_deferrable,
            max_wait_s=hints.max_wait_s,
            stream=None if stream is None else stream.part(index, tenant.name),
        )
        # Pooled prompts generate no text, so one parser suffices for all.
        is_needed = sampling.pooling is None or not asked
        count_texts = num_texts if is_needed else 0
        texts = [
            _parser(plan, sampling, keep, contexts[index // count], f"{answer.id}-{index * num_texts + at}")
            for at in range(count_texts)
        ]
        asked.append((generate, texts or asked[0][1]))
    return asked


def _parser(
    plan: GenerationPlan,
    sampling: SamplingParams,
    keep: Collection[str] | None,
    context: Sequence[int],
    name: str,
) -> OutputParser:
    """Return the parser of one choice, whose text keeps these special tokens and continues that of `context`."""
    codec = plan.served.codec
    text = codec.text_stream(
        sampling.stop,
        min_tokens=sampling.min_tokens,
        keep=keep,
        includes_stop=bool(plan.request.include_stop_str_in_output),
        after=context,
    )
    spelled = None if sampling.logprobs is None else SpelledText(codec.decoder(keep, context))
    return OutputParser(text, plan.parse_spec, spelled, name)


def context_of(
    name: AnswerName | str,
    served: ServedModel,
    request: ChatRequest | CompletionRequest,
    prompts: Sequence[EncodedPrompt],
) -> ResponseContext:
    """Return the fields that all parts of a request's answer share. A `name` of text is the prefix of a new id."""
    options = request.stream_options
    return ResponseContext.begin(
        name,
        served.card.id,
        prompts,
        num_choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        with_token_ids=bool(request.return_token_ids),
        include_timings=bool(request.include_timings),
        system_fingerprint=served.card.fingerprint,
    )
