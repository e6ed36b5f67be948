"""Typed models of the HTTP API's requests.

They check the form of the JSON; `SamplingParams` checks the ranges of sampling parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, JsonValue, ValidationError

from deployments.api.base.errors import invalid
from deployments.api.fields.answer_forms import (
    AnyChoice,
    AnySchema,
    ResponseFormat,
    StructuredOutputs,
)
from deployments.api.fields.content_parts import TEXT_OF
from deployments.api.fields.counts import check_counts
from deployments.api.fields.field_values import (
    described_as,
    join_content,
    none_as_empty,
    one_of,
    other_than,
    parse_early_stopping,
    parse_ids,
    parse_logit_bias,
    parse_prompt,
    parse_role,
    parse_service_tier,
    parse_stop,
    taking,
    whole,
    whole_ids,
)
from deployments.api.fields.history import taken_messages
from deployments.api.fields.ignored import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    IgnoredFields,
    keep_known,
)
from deployments.api.fields.nested_fields import keep_known_within
from deployments.api.fields.offered_tools import allowed, name_left_out
from deployments.api.fields.schema_notes import note_unknown
from deployments.api.fields.strict_model import LeftOut, StrictModel
from deployments.api.fields.tools import AnyCall, AnyTool, Function, FunctionCall, ToolCall, ToolChoice
from deployments.api.fields.validation_errors import translated
from deployments.config.limits import Limits

Role = Literal["system", "user", "assistant", "tool"]


ServiceTier = Literal["flex", "priority"]
TruncationSide = Annotated[Literal["left", "right"] | None, one_of("left", "right")]
Verbosity = Annotated[Literal["low", "medium", "high"] | None, one_of("low", "medium", "high")]
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None, one_of(*_EFFORTS)
]
Int = Annotated[int, taking(whole, int), Field(ge=-(2**63), lt=2**63)]
"""An integer of 64 bits; the sampling parameters' own ranges are narrower."""
T = TypeVar("T")
_Some: TypeAlias = Annotated[list[T], Field(min_length=1)]


class TextPart(StrictModel):
    """A part of a message's content, as /openapi.json describes it."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(StrictModel):
    """A text with which an answer refuses."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(LeftOut):
    """A part that a text model cannot read: a text replaces it."""

    type: Annotated[str, other_than(*TEXT_OF)]


AnyPart: TypeAlias = TextPart | RefusalPart | OtherPart
_AnyRole = Literal["system", "developer", "user", "assistant", "tool", "function"]
_Ids = _Some[int]
_Prompts = str | _Ids | _Some[str] | _Some[_Ids]


class Message(StrictModel):
    """One message of a conversation, once `history.taken_messages` has taken it. `developer` is the newer name of
    `system`, and `function` the older one of `tool`.
    """

    role: Annotated[Role, taking(parse_role, _AnyRole)]
    content: Annotated[str, taking(join_content, str | _Some[AnyPart] | None)]
    """ "" in an assistant's message without an answer, where it may be null or omitted."""
    tool_calls: Annotated[list[ToolCall], FailFast(), described_as(list[AnyCall])] = Field(default_factory=list)
    """Functions that the assistant called."""
    tool_call_id: str | None = None
    """Id of the call that a result answers."""
    name: str | None = None
    """The speaker, for templates that show it; in a result, the called function."""
    reasoning: str | None = None
    """The assistant's thoughts before its answer; also `reasoning_content`."""


class StreamOptions(StrictModel):
    """Contents of a stream besides its text."""

    include_usage: bool | None = None
    """End the stream with a chunk that has no choices and the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`, every chunk has the usage so far."""
    include_obfuscation: bool | None = None
    """Accepted and not done: padding against traffic analysis."""


class SampledRequest(StrictModel):
    """Fields that all requests to generate share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    """llama.cpp's name for `repetition_penalty`."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], taking(parse_logit_bias, dict[str, float] | None)] = Field(
        default_factory=dict
    )
    min_tokens: Int | None = None
    stop: Annotated[list[str], taking(parse_stop, str | list[str] | None)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], taking(parse_ids, list[int] | None)] = Field(default_factory=list)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    """Whether the stop string or stop token that ends the answer is part of its text."""
    skip_special_tokens: bool | None = None
    """false: special tokens are part of the text."""
    truncate_prompt_tokens: Int | None = None
    """Most tokens of a prompt; of a longer one the last are taken. -1: as many as fit."""
    truncation_side: TruncationSide = None
    """Where a longer prompt is cut."""
    seed: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    """A format that the answer must match; excludes a format given otherwise."""
    guided_json: AnySchema = None
    """An older name of vLLM's for `structured_outputs.json`; those below are alike."""
    guided_regex: str | None = None
    guided_choice: AnyChoice = None
    guided_grammar: str | None = None
    json_schema: AnySchema = None
    """SGLang's name for `structured_outputs.json`."""
    regex: str | None = None
    """SGLang's name for `structured_outputs.regex`."""
    ebnf: str | None = None
    """SGLang's name for `structured_outputs.grammar`, in GBNF."""
    bad_words: Annotated[list[str], taking(none_as_empty, list[str] | None)] = Field(default_factory=list)
    """Words that the answer must not have."""
    allowed_token_ids: Annotated[list[int] | None, taking(whole_ids, list[int] | None)] = None
    """The only tokens that the answer may have."""
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt."""
    priority: Int | None = None
    """Requests with a lower priority are scheduled first, as in vLLM."""
    service_tier: Annotated[ServiceTier | None, taking(parse_service_tier, str | None)] = None
    """Without a `priority`: "priority" counts as -1, "flex" as 1, and all others as 0."""
    prompt_cache_key: str | None = None
    """Hint that requests with this key share a prefix; `x-session-id` takes precedence."""
    include_timings: bool | None = None
    """Report where the request's time went, as `timings`: see `deployments/api/record/timings.py`."""


class _Generating(SampledRequest):
    """Fields that chat and completions share."""

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    n: Int | None = None
    best_of: Int | None = None
    use_beam_search: bool | None = None
    """Return the likeliest outputs that a beam search finds; `best_of`, or `n`, is its width."""
    length_penalty: float | None = None
    """Beam search divides its scores by length to this power."""
    early_stopping: Annotated[bool | Literal["never"] | None, BeforeValidator(parse_early_stopping)] = None
    """Whether a beam search ends with the first `best_of` finished outputs."""
    response_format: ResponseFormat | None = None
    prompt_logprobs: Int | None = None
    """Report the log-probability and rank of each prompt token, and this many alternatives to it."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in `logprobs` by their ids, as "token_id:17", because several may have the same text."""
    return_token_ids: bool | None = None
    """Report the token ids of the prompt and of each choice."""


_TWO_ENDS: dict[str, JsonValue] = {
    "required": ["continue_final_message", "add_generation_prompt"],
    "properties": {"continue_final_message": {"const": True}, "add_generation_prompt": {"const": True}},
}


class _Rendered(StrictModel):
    """Fields on how a conversation is rendered."""

    model_config = ConfigDict(json_schema_extra={"not": _TWO_ENDS})

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""
    documents: list[dict[str, Any]] | None = None
    """Texts that the model is to answer from, for templates that show them."""
    add_generation_prompt: bool | None = None
    """End the rendered messages where the model's answer begins; the default."""
    continue_final_message: bool | None = None
    """End them within the last message, which the model continues."""


class _Conversing(_Rendered):
    """Fields of a conversation."""

    tools: Annotated[list[AnyTool], FailFast(), taking(none_as_empty, list[AnyTool] | None)] = Field(
        default_factory=list
    )
    """The functions and custom tools that the model sees and may call. Other tools are omitted."""

    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """See `StrictModel`."""
        if isinstance(messages := fields.get("messages"), list):
            if not messages:
                raise invalid("messages is empty; it needs at least one message.", "messages")
            fields["messages"] = taken_messages(messages, ignored)
        name_left_out(fields.get("tools"), ignored)
        if "tool_choice" in fields:
            fields["tool_choice"] = allowed(fields["tool_choice"], ignored)
        return fields


class ChatRequest(_Generating, _Conversing):
    """Body of POST /v1/chat/completions."""

    unsupported = CHAT_UNSUPPORTED

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tool_choice: ToolChoice = None
    """Whether the model may ("auto", the default), must ("required" or a name) or must not ("none") call one."""
    functions: Annotated[list[Function], FailFast(), taking(none_as_empty, list[Function] | None)] = Field(
        default_factory=list
    )
    """OpenAI's older form of `tools`: the answer has its call in the older form, too."""
    function_call: FunctionCall = None
    """The older form of `tool_choice`."""
    reasoning_effort: ReasoningEffort = None
    """How much the model is to think, for templates that know it; none and minimal: not at all."""
    thinking_token_budget: Int | None = None
    """Tokens of reasoning after which its end is forced; -1: as many as the model wants."""
    include_reasoning: bool | None = None
    """false: the answer omits the model's thoughts."""
    verbosity: Verbosity = None
    """How much the model is to say, for templates that know it."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may have several calls; false allows one only."""


class CompletionRequest(_Generating):
    """Body of POST /v1/completions."""

    unsupported = COMPLETION_UNSUPPORTED

    prompt: Annotated[list[Any], taking(parse_prompt, _Prompts)]
    """A list of prompts once parsed, each a string or a list of token ids."""
    echo: bool | None = None
    logprobs: Int | None = None


_ONE_TEXT: list[JsonValue] = [
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}, "not": {"required": ["messages"]}},
    {
        "required": ["messages"],
        "properties": {"prompt": {"type": "null"}, "add_special_tokens": {"enum": [False, None]}},
    },
]


class TokenizeRequest(_Conversing):
    """Body of POST /tokenize: either `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _ONE_TEXT, "not": _TWO_ENDS})

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1)] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    """Defaults to true for a prompt, and to false for messages, whose template has special tokens."""
    return_token_strs: bool | None = None
    """Report the tokens' texts in the vocabulary, too."""


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast(), taking(whole_ids, list[int])]


Parsed = TypeVar("Parsed", bound=StrictModel)


def parse(body: dict[str, Any], limits: Limits, kind: type[Parsed]) -> tuple[Parsed, Sequence[str]]:
    """Return `body` as a request of `kind`, and the names of ignored fields to be shown.

    Raises `ApiError` 400 that names the first field at fault.
    """
    ignored = IgnoredFields(limits.unknown_fields)
    fields = taken_fields(kind, body, limits, ignored)
    try:
        return kind.model_validate(fields), ignored.names
    except ValidationError as error:
        raise translated(error) from None


def taken_fields(
    kind: type[StrictModel], body: Mapping[str, Any], limits: Limits, ignored: IgnoredFields
) -> dict[str, Any]:
    """Return a body's fields as those of a request of `kind`; `ignored` names omitted fields.

    Raises `ApiError` 400 that names the first field at fault. Types are checked afterwards.
    """
    fields = keep_known(body, kind.model_fields.keys(), kind.unsupported, ignored)
    check_counts(fields, limits)
    note_unknown(fields, ignored)
    return keep_known_within(kind, kind.taken(fields, ignored), ignored)
