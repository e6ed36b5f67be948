"""Formats in which models write calls, and how to recognize the one that a chat template shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from deployments.api.tools import hermes, llama3
from deployments.api.tools.segments import Parser


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format: OPENS {"name": NAME, "KEY": {...}} CLOSES, repeated with SEPARATOR between."""

    parser: Callable[[Collection[str]], Parser[None]]
    """Creates the parser of an answer, given the names of the functions that may be called."""
    is_taught: Callable[[str], bool]
    """Whether a chat template, given as text, shows this format to models."""
    key: str
    opens: str = ""
    closes: str = ""
    separator: str = "\n"
    marks: tuple[str, ...] = ()
    """Marks that tell calls from text; if they are special tokens, they must stay in the parsed text."""

    def spell(self, name: str, arguments: str) -> str:
        """Write a call with its arguments, given as JSON."""
        return f'{self.opens}{{"name": {json.dumps(name)}, "{self.key}": {arguments}}}{self.closes}'


def _teaches_hermes(template: str) -> bool:
    """Other formats use the same mark with another syntax: <function=...> (Qwen3-Coder), <arg_key> (GLM)."""
    others = ("<function=", "<arg_key>")
    return (
        hermes.OPEN in template
        and re.search(r"""\\?["']arguments\\?["']""", template) is not None
        and not any(other in template for other in others)
    )


def _teaches_llama3(template: str) -> bool:
    example = r"""\\?["']name\\?["']\s*:[^{}]{0,64}\\?["']parameters\\?["']\s*:"""
    return "<|start_header_id|>" in template and re.search(example, template) is not None


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        hermes.parse_hermes,
        _teaches_hermes,
        key="arguments",
        opens=f"{hermes.OPEN}\n",
        closes=f"\n{hermes.CLOSE}",
        marks=(hermes.OPEN, hermes.CLOSE),
    ),
    "llama3": ToolFormat(
        llama3.parse_llama3,
        _teaches_llama3,
        key="parameters",
        separator="; ",
        marks=(llama3.PYTHON_TAG,),
    ),
}
"""All formats by their name in the settings."""
