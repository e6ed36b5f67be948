"""The types of answers, as /openapi.json describes them.

They are encoded by hand where they are made, because that is fastest; tests hold them to these types, in which no
field may be missing. A field with the default UNSET is only present if the request asked for it, or if it has a
value.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from deployments.api.record.timings import RequestTimings


class TokenAlternative(Struct):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    """A generated token with the likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(Struct):
    """Log-probabilities of a choice."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(Struct):
    """Log-probability and rank of a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


class GeneratedFunction(Struct):
    """A call as the model wrote it: `arguments` may not be valid JSON."""

    name: str
    arguments: str


class GeneratedInput(Struct):
    """A call of a custom tool, as the model wrote it."""

    name: str
    input: str


class GeneratedCall(Struct):
    """One tool call of a message."""

    id: str
    type: Literal["function", "custom"]
    function: GeneratedFunction | UnsetType = UNSET
    custom: GeneratedInput | UnsetType = UNSET


class ChatAnswer(Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[GeneratedCall] | UnsetType = UNSET
    function_call: GeneratedFunction | UnsetType = UNSET


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class CachedTokens(Struct):
    """Tokens of prompts that were not computed again."""

    cached_tokens: int


class ReasoningTokens(Struct):
    """Tokens of reasoning among those generated."""

    reasoning_tokens: int


class TokenUsage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class ChatCompletion(Struct):
    """An answer to a conversation; a stream has its parts as `chat.completion.chunk` and ends with [DONE]."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class TextLogprobs(Struct):
    """Log-probabilities of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Struct):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class TextCompletion(Struct):
    """Continuations of prompts; a stream has their parts in the same form and ends with [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    system_fingerprint: str | UnsetType | None = UNSET
    timings: RequestTimings | UnsetType = UNSET


class GeneratedText(Struct, tag="text", tag_field="type"):
    """Text of an answer."""

    text: str


class GeneratedThinking(Struct, tag="thinking", tag_field="type"):
    """The model's thoughts before its answer."""

    thinking: str
    signature: str


class GeneratedToolUse(Struct, tag="tool_use", tag_field="type"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Struct):
    """Tokens of thinking among those generated."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Tokens of a request, as Anthropic counts them: `input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(Struct):
    """A message of Anthropic's API; a stream has the events that Anthropic's has."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[GeneratedText | GeneratedThinking | GeneratedToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "stop_sequence", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage
    timings: RequestTimings | UnsetType = UNSET


class TokenCount(Struct):
    """The length of a prompt."""

    input_tokens: int


class InputTokenCount(Struct):
    """The length of a response's prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """The limit that cut a response off."""

    reason: str


class ResponseAnswer(Struct):
    """A response; a stream has its typed events. Fields of the request are repeated as OpenAI's API does."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    output: list[dict[str, Any]]
    temperature: float | None
    top_p: float | None
    background: bool
    include: list[str]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    user: str | None
    conversation: dict[str, Any] | UnsetType | None = UNSET
    completed_at: int | UnsetType | None = UNSET
    timings: RequestTimings | UnsetType = UNSET


class ConversationAnswer(Struct):
    """A stored conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Struct):
    """A conversation that was forgotten."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class DeletedResponse(Struct):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class EndedStream(Struct):
    """A stream that was ended."""

    id: str
    object: Literal["stream"]
    deleted: Literal[True]


class InputItems(Struct):
    """A page of a response's input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokensAnswer(Struct):
    """Token ids of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class TextAnswer(Struct):
    """The text of token ids."""

    prompt: str
