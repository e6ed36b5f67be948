"""Turns a request of Anthropic's API into the one of OpenAI's that asks for the same.

system, messages of blocks  ─▶  messages: a result is a message of its own, an answer is one with its calls
tools, tool_choice          ─▶  functions, and whether one must be called
output_config.format        ─▶  response_format
thinking, its effort        ─▶  variables of the chat template
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from pydantic import ValidationError

from deployments.api.anthropic.content import Block, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from deployments.api.anthropic.protocol import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    SchemaTool,
    ToolPreference,
    of_answers,
)
from deployments.api.base import exact_json
from deployments.api.base.errors import ApiError, invalid
from deployments.api.base.field_checks import in_range
from deployments.api.fields.answer_forms import JsonSchemaFormat, ResponseFormat
from deployments.api.fields.ignored import IgnoredFields
from deployments.api.fields.protocol import ChatRequest, Message, taken_fields
from deployments.api.fields.tools import CalledFunction, Function, OtherTool, Tool, ToolCall
from deployments.api.fields.validation_errors import translated
from deployments.config.limits import Limits

_Kind = TypeVar("_Kind", bound=CountTokensRequest)
_SAME = ("temperature", "top_p", "stream", "cache_salt", "include_timings", "priority", "prompt_cache_key", "seed")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that no template knows, as the most that templates know."""
_NAMES: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
        (r"tools\.(\d+)\.function\.name", r"tools.\1.name"),
        (r"tool_choice\.function\.name", "tool_choice.name"),
        (r"response_format\.json_schema\.schema|response_format", "output_config.format.schema"),
        (r"^stop\b", "stop_sequences"),
        (r"^messages\.\d+\.tool_calls", "a message"),
    )
]
"""Names of OpenAI's fields in errors about requests of Anthropic's API."""


@dataclass(frozen=True, slots=True)
class AskedMessage:
    """A request of Anthropic's API, translated to one of chat."""

    chat: ChatRequest
    thinking_budget: int | None
    """Most tokens of thinking, where the model's can be bounded."""
    shows_thinking: bool


def parse_messages(body: dict[str, Any], limits: Limits) -> tuple[AskedMessage, Sequence[str]]:
    """Return a body of /v1/messages, and the names of ignored fields to be shown. Raises `ApiError` 400."""
    request, ignored = _parsed(body, MessagesRequest, limits)
    chat = _chat(
        request,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or [],
        top_k=request.top_k or None,  # 0 is "all"
        **{name: getattr(request, name) for name in _SAME},
    )
    thinking = request.thinking
    budget = None if thinking is None else thinking.budget_tokens
    is_hidden = thinking is not None and thinking.display == "omitted"
    return AskedMessage(chat, budget, not is_hidden), ignored


def parse_count(body: dict[str, Any], limits: Limits) -> tuple[ChatRequest, Sequence[str]]:
    """Return a body of /v1/messages/count_tokens, and the names of ignored fields. Raises `ApiError` 400."""
    without_effect = of_answers()
    counted = {name: value for name, value in body.items() if name not in without_effect}
    request, ignored = _parsed(counted, CountTokensRequest, limits)
    return _chat(request), ignored


def in_own_words(error: ApiError) -> ApiError:
    """Return an error about a translated request with the names that fields have in Anthropic's API."""
    message = error.message
    if error.code == "context_length_exceeded":
        # Claude Code knows this beginning, and shortens the conversation.
        message = f"prompt is too long: {message}"
    for pattern, name in _NAMES:
        message = pattern.sub(name, message)
    return ApiError(error.status, message, param=error.param, code=error.code, headers=error.headers)


def _parsed(body: dict[str, Any], kind: type[_Kind], limits: Limits) -> tuple[_Kind, Sequence[str]]:
    ignored = IgnoredFields(limits.unknown_fields)
    fields = taken_fields(kind, body, limits, ignored)
    if fields.get("messages") == []:
        raise invalid("messages is empty; it needs at least one message.", "messages")
    try:
        given = {name: value for name, value in fields.items() if value is not None}
        return kind.model_validate(given), ignored.names
    except ValidationError as error:
        raise translated(error) from None


def _chat(request: CountTokensRequest, **fields: Any) -> ChatRequest:
    preference = request.tool_choice
    if request.thinking is not None:
        in_range("thinking.budget_tokens", request.thinking.budget_tokens, 1, 2**31 - 1)
    form = (request.output_config and request.output_config.format) or request.output_format
    return ChatRequest(
        model=request.model,
        messages=list(_messages(request)),
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=None if preference is None else _choice(preference),
        parallel_tool_calls=False if preference and preference.disable_parallel_tool_use else None,
        response_format=None if form is None else _response_format(form),
        chat_template_kwargs=_variables(request),
        continue_final_message=request.messages[-1].role == "assistant" or None,
        **fields,
    )


def _variables(request: CountTokensRequest) -> dict[str, Any]:
    """Return the chat template's variables about thinking; it reads the names that it knows."""
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and (effort := request.output_config.effort):
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return variables


def _response_format(form: OutputFormat) -> ResponseFormat:
    schema = JsonSchemaFormat.model_validate({"name": "answer", "schema": form.schema_})
    return ResponseFormat(type="json_schema", json_schema=schema)


def _choice(preference: ToolPreference) -> Any:
    if preference.type != "tool":
        return _CHOICES[preference.type]
    if preference.name is None:
        raise invalid('tool_choice.name is required where tool_choice.type is "tool".', "tool_choice.name")
    return {"type": "function", "function": {"name": preference.name}}


def _tool(tool: SchemaTool | OtherTool) -> Tool | OtherTool:
    if isinstance(tool, OtherTool):
        return tool
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _messages(request: CountTokensRequest) -> Iterator[Message]:
    """Yield the messages of a conversation. Those of one role that follow one another are one turn."""
    if request.system:
        yield Message(role="system", content=request.system)
    if any(isinstance(block, ToolUseBlock) for block in request.messages[-1].content):
        raise invalid("messages ends with a call; add a message with its tool_result.", "messages")
    for role, turn in groupby(request.messages, key=lambda message: message.role):
        blocks = [block for message in turn for block in message.content]
        if role == "assistant":
            yield _answer(blocks)
        elif role == "system":
            yield Message(role="system", content=_text(blocks))
        else:
            yield from _of_user(blocks)


def _answer(blocks: Sequence[Block]) -> Message:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(
            id=block.id,
            function=CalledFunction(name=block.name, arguments=exact_json.encode(block.input).decode()),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "\n".join(filter(None, thoughts)) or None
    return Message(role="assistant", content=_text(blocks), tool_calls=calls, reasoning=reasoning)


def _of_user(blocks: Sequence[Block]) -> Iterator[Message]:
    """Yield the user's texts and the tools' results, in the order of the blocks."""
    said: list[Block] = []
    for block in blocks:
        if not isinstance(block, ToolResultBlock):
            said.append(block)
            continue
        if said:
            yield Message(role="user", content=_text(said))
            said = []
        content = f"Error: {block.content}" if block.is_error else block.content
        yield Message(role="tool", content=content, tool_call_id=block.tool_use_id)
    if said or not blocks:
        yield Message(role="user", content=_text(said))


def _text(blocks: Iterable[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
