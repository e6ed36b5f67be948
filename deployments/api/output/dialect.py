"""How a model's conversations are written beyond plain text: found out from its chat template and vocabulary."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from deployments.api.output import reasoning
from deployments.api.tools.formats import FORMATS, ToolFormat
from deployments.config.settings import ChatSettings


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model's answers may hold, and how its prompts show tools."""

    tools: ToolFormat | None = None
    """How it writes calls; None: it makes none."""
    has_place_for_tools: bool = False
    """Whether its template writes tools, calls and results; else they are put into messages as text."""
    thinks: bool = False
    """Whether its answers may begin with reasoning."""


def dialect_of(tokenizer: Any, settings: ChatSettings) -> Dialect:
    """As the settings have it; what they leave to "auto" by looking at the template.

    Tools: the first format that the template shows; where a template knows nothing of tools, Hermes' in the
    messages' text. Reasoning: where the template, or two tokens of the vocabulary, are its marks.
    """
    template = _template(tokenizer)
    has_place = re.search(r"\btools\b", template) is not None
    tools = FORMATS.get(settings.tools)
    if settings.tools == "auto" and template:
        taught = (known for known in FORMATS.values() if known.is_taught(template))
        tools = next(taught, None) if has_place else FORMATS["hermes"]
    thinks = settings.reasoning == "think"
    if settings.reasoning == "auto":
        thinks = reasoning.CLOSE in template or {reasoning.OPEN, reasoning.CLOSE} <= _vocabulary(tokenizer).keys()
    return Dialect(tools, has_place, thinks)


def _template(tokenizer: Any) -> str:
    """The template's text, that for tools where there are several; "" where there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=[]))
    except (AttributeError, ValueError):
        return ""


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    get_vocab = getattr(tokenizer, "get_vocab", None)
    return get_vocab() if get_vocab else {}
