"""Turns a request's fields about rendering into `TemplateOptions`.

chat_template_kwargs  ──────────────▶ variables of any name except the server's own
documents, verbosity, reasoning_effort ─▶ variables of these names
reasoning_effort: none, minimal ────▶ enable_thinking: false, for templates that know it
"""

from __future__ import annotations

from typing import Any

from deployments.api.base import exact_json
from deployments.api.base.errors import invalid, quoted
from deployments.api.base.field_checks import at_most, check_depth
from deployments.api.conversation.options import PLAIN_OPTIONS, TemplateOptions
from deployments.api.fields.protocol import ChatRequest, TokenizeRequest
from deployments.config.limits import Limits

OWN = ("messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message")
"""Names that mean something else, or that have a field of their own."""


def template_options(request: ChatRequest | TokenizeRequest, limits: Limits) -> TemplateOptions:
    """Return how a request's conversation is rendered. Raises `ApiError` 400 that names the field."""
    variables = _variables(request, limits)
    continues = bool(request.continue_final_message)
    if not variables and not continues and request.add_generation_prompt is not False:
        return PLAIN_OPTIONS
    if continues and request.add_generation_prompt:
        raise invalid(
            "continue_final_message cannot be combined with add_generation_prompt, which begins a new message; "
            "leave one of them out.",
            "continue_final_message",
        )
    return TemplateOptions(not continues and request.add_generation_prompt is not False, continues, variables)


def _variables(request: ChatRequest | TokenizeRequest, limits: Limits) -> dict[str, Any]:
    given = request.chat_template_kwargs or {}
    for name in given:
        if name in OWN or name.endswith("_token") or not (name.isascii() and name.isidentifier()):
            raise invalid(
                f"chat_template_kwargs has {quoted(name)}, which is not a variable that clients may set.",
                "chat_template_kwargs",
            )
    variables: dict[str, Any] = {}
    if request.documents:
        variables["documents"] = request.documents
    if isinstance(request, ChatRequest):
        if request.reasoning_effort is not None:
            variables["reasoning_effort"] = request.reasoning_effort
            variables["enable_thinking"] = request.reasoning_effort not in ("none", "minimal")
        if request.verbosity is not None:
            variables["verbosity"] = request.verbosity
    variables |= given
    if variables:
        size = len(exact_json.encode(variables))
        param = "chat_template_kwargs" if given else "documents"
        at_most(limits, "max_template_bytes", param, size, "bytes")
        check_depth(limits, "max_json_depth", variables, param)
    return variables
