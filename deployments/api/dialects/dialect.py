"""Detects from a chat template and vocabulary how a model writes calls and reasoning, and how its prompts show
tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deployments.api.conversation.template import ChatTemplate, TemplateRefused, template_text
from deployments.api.dialects import harmony
from deployments.api.dialects.formats import FORMATS
from deployments.api.dialects.reasoning import HARMONY, KNOWN, THINK, Thoughts
from deployments.api.dialects.tool_format import ToolFormat
from deployments.config.settings import ChatSettings


@dataclass(frozen=True, slots=True)
class Dialect:
    """The formats that a model's answers may contain, and how its prompts show tools."""

    tools: ToolFormat | None = None
    """How the model writes calls; None if it makes none."""
    has_place_for_tools: bool = False
    """Whether the template renders tools, calls and results; otherwise they become text in messages."""
    has_place_for_calls: bool = False
    """Whether a template with a place for tools renders calls; otherwise they become text of their messages."""
    thoughts: Thoughts | None = None
    """The marks of reasoning, with which the model's answers may begin; None if it does not think."""
    merges_systems: bool = False
    """Whether later system messages of a conversation are merged into its first message."""


def dialect_of(tokenizer: Any, settings: ChatSettings) -> Dialect:
    """Return the dialect that the settings state, detecting what they leave to "auto".

    Tools use the first format that the template shows, be it only in messages with calls as DeepSeek's do, or
    Hermes' if it shows none and does not mention tools. Channels are those that a template shows. Reasoning is
    assumed if the template, or the vocabulary, contains its marks. Later system messages are tried with the
    template.
    """
    template = template_text(tokenizer)
    has_place = re.search(r"\btools\b", template) is not None
    tools = FORMATS.get(settings.tools)
    if settings.tools == "auto" and template:
        taught = (known for known in FORMATS.values() if known.is_taught(template))
        tools = next(taught, None if has_place else FORMATS["hermes"])
    thoughts: Thoughts | None = None
    if all(mark in template for mark in (harmony.CHANNEL, harmony.MESSAGE)):
        thoughts = HARMONY  # Without it, even an answer's text would have the marks of its channel.
    elif settings.reasoning != "none":
        words = _vocabulary(tokenizer).keys()
        shown = [marks for marks in KNOWN if marks.is_shown(template)]
        shown += [marks for marks in KNOWN if set(marks.marks) <= words]
        thoughts = next(iter(shown), THINK if settings.reasoning == "think" else None)
    merges = settings.late_system == "merge" or (
        settings.late_system == "auto" and not _shows_late_system(tokenizer)
    )
    return Dialect(tools, has_place, "tool_calls" in template, thoughts, merges)


def _shows_late_system(tokenizer: Any) -> bool:
    """Whether the template takes a system message between others: some refuse it, and some leave it out."""
    roles = ("system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": f"probe{place}"} for place, role in enumerate(roles)]
    try:
        return "probe3" in ChatTemplate(tokenizer).render(messages, None, add_generation_prompt=True)
    except TemplateRefused:
        return False


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    get_vocab = getattr(tokenizer, "get_vocab", None)
    return get_vocab() if get_vocab else {}
