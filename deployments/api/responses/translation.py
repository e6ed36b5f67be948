"""Turns a request for a response into a chat request, and names fields in errors as the client knows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from deployments.api.base.errors import ApiError, invalid
from deployments.api.fields.protocol import ChatRequest, SampledRequest, parse
from deployments.api.responses.items import Item, messages_of
from deployments.api.responses.protocol import ResponsesRequest
from deployments.api.responses.tools import ShownTool, chosen
from deployments.config.limits import Limits

_NAMES = (
    (re.compile(r"^(?:max_completion_tokens|max_tokens)\b"), "max_output_tokens"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^response_format(?:\.json_schema)?\b"), "text.format"),
    (re.compile(r"^reasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\.format\.grammar\b"), ".format"),
    (
        re.compile(r"^tool_choice(?:\.allowed_tools)?((?:\.tools\.\d+)?)(?:\.(?:function|custom))?\b"),
        r"tool_choice\1",
    ),
)
"""Fields of chat requests, and their names here."""
_TOOL = re.compile(r"^tools\.(\d+)(?:\.(?:function|custom))?\b")


def chat_request(
    asked: ResponsesRequest, items: Sequence[Item], limits: Limits, tools: Sequence[ShownTool]
) -> ChatRequest:
    """Return the chat request that asks for the same. Raises `ApiError` 400 that names the field at fault."""
    system = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    body: dict[str, Any] = {
        "model": asked.model,
        "messages": [*system, *messages_of(items)],
        "tools": [tool.in_chat for tool in tools],
        "tool_choice": chosen(asked.tool_choice, tools),
        "parallel_tool_calls": asked.parallel_tool_calls,
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _response_format(asked),
        "reasoning_effort": asked.reasoning.effort if asked.reasoning else None,
        "verbosity": asked.text.verbosity if asked.text else None,
        "thinking_token_budget": asked.thinking_token_budget,
        "chat_template_kwargs": asked.chat_template_kwargs,
    }
    if reports_logprobs(asked):
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    chat, _ = parse(body, limits, ChatRequest)
    shared = {name: getattr(asked, name) for name in SampledRequest.model_fields}
    # A response that is generated in the background is read as a stream.
    return chat.model_copy(update=shared | {"stream": asked.stream or asked.background})


def reports_logprobs(asked: ResponsesRequest) -> bool:
    """Whether the text's log-probabilities are to be reported."""
    return "message.output_text.logprobs" in asked.include or bool(asked.top_logprobs)


def as_named_here(error: ApiError, tools: Sequence[ShownTool]) -> ApiError:
    """Return an error about a chat request with these tools as one about the request that it stands for."""
    if error.param is None:
        return error
    param = _TOOL.sub(lambda found: tools[int(found[1])].place, error.param)
    for pattern, ours in _NAMES:
        param = pattern.sub(ours, param, count=1)
    message = error.message
    if message.startswith(error.param):
        message = param + message[len(error.param) :]
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def _response_format(asked: ResponsesRequest) -> dict[str, Any] | None:
    given = None if asked.text is None else asked.text.format
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    if given.schema_ is None:
        raise invalid("text.format.schema is required by this type.", "text.format.schema")
    return {
        "type": "json_schema",
        "json_schema": {"name": given.name or "answer", "schema": given.schema_, "strict": given.strict},
    }
