"""Formats in which models write calls, and how to recognize the one that a chat template shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.api.tools import coder, hermes, llama3, mistral, pythonic
from deployments.api.tools.named import Functions
from deployments.api.tools.segments import Parser

ArgumentRules = Callable[[str, dict[str, Any]], list[str]]


def _plain(arguments: str) -> str:
    return arguments


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format: OPENS call SEPARATOR call CLOSES. Each call is HEAD arguments TAIL; HEAD has its name."""

    parser: Callable[[Functions], Parser[None]]
    """Creates the parser of an answer, given the functions that may be called."""
    is_taught: Callable[[str], bool]
    """Whether a chat template, given as text, shows this format to models."""
    head: str
    """What comes before the arguments; NAME stands for the function's."""
    tail: str
    opens: str = ""
    closes: str = ""
    separator: str = "\n"
    marks: tuple[str, ...] = ()
    """Marks that tell calls from text; if they are special tokens, they must stay in the parsed text."""
    begins: str = ""
    """The mark with which calls begin after text; "" if they can only begin an answer."""
    initial: str = "{"
    """The character with which an answer with calls begins, where there is no such mark."""
    key: str | None = None
    """The member with the arguments, where a whole call is a JSON object and nothing else."""
    has_short_ids: bool = False
    """Whether the templates take only ids of calls that have nine letters and digits."""
    rules: ArgumentRules | None = None
    """Makes the grammar's rules for arguments, given the first rule's name and the schema. None: they are JSON."""
    write: Callable[[str], str] = _plain
    """Writes arguments, given as JSON."""

    def spell(self, name: str, arguments: str) -> str:
        """Write a call with its arguments, given as JSON."""
        return f"{self.before(name)}{self.write(arguments)}{self.tail}"

    def spell_all(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write all calls of an answer, each a name and its arguments."""
        return self.opens + self.separator.join(self.spell(*call) for call in calls) + self.closes

    def before(self, name: str) -> str:
        """Write what comes before the arguments of a call."""
        return self.head.replace("NAME", name)


def _json_head(key: str) -> str:
    return f'{{"name": "NAME", {json.dumps(key)}: '


def _teaches_hermes(template: str) -> bool:
    """Other formats use the same mark with another syntax: <function=...> (Qwen3-Coder), <arg_key> (GLM)."""
    others = ("<function=", "<arg_key>")
    return (
        hermes.OPEN in template
        and re.search(r"""\\?["']arguments\\?["']""", template) is not None
        and not any(other in template for other in others)
    )


def _teaches_coder(template: str) -> bool:
    return "<function=" in template and "<parameter=" in template


def _teaches_llama3(template: str) -> bool:
    example = r"""\\?["']name\\?["']\s*:[^{}]{0,64}\\?["']parameters\\?["']\s*:"""
    return "<|start_header_id|>" in template and re.search(example, template) is not None


def _teaches_mistral(template: str) -> bool:
    """Its first templates write calls as a list."""
    return re.search(r"\[TOOL_CALLS\]\s*\[", template) is not None


def _teaches_mistral_named(template: str) -> bool:
    return mistral.MARK in template and not _teaches_mistral(template)


def _teaches_pythonic(template: str) -> bool:
    return re.search(r"\[\w+\(\w+\s*=\s*[\w'\"]+", template) is not None


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        hermes.parse_hermes,
        _teaches_hermes,
        head=f"{hermes.OPEN}\n{_json_head('arguments')}",
        tail=f"}}\n{hermes.CLOSE}",
        marks=(hermes.OPEN, hermes.CLOSE),
        begins=hermes.OPEN,
    ),
    "qwen3_coder": ToolFormat(
        coder.parse_coder,
        _teaches_coder,
        head=f"{hermes.OPEN}\n<function=NAME>\n",
        tail=f"</function>\n{hermes.CLOSE}",
        marks=(hermes.OPEN, hermes.CLOSE),
        begins=hermes.OPEN,
        rules=coder.argument_rules,
        write=coder.written,
    ),
    "mistral_list": ToolFormat(
        mistral.parse_mistral,
        _teaches_mistral,
        opens=f"{mistral.MARK}[",
        closes="]",
        head=_json_head("arguments"),
        tail="}",
        separator=", ",
        marks=mistral.MARKS,
        has_short_ids=True,
        begins=mistral.MARK,
    ),
    "mistral": ToolFormat(
        mistral.parse_mistral,
        _teaches_mistral_named,
        head=f"{mistral.MARK}NAME{mistral.ARGUMENTS}",
        tail="",
        separator="",
        marks=mistral.MARKS,
        has_short_ids=True,
        begins=mistral.MARK,
    ),
    "llama3": ToolFormat(
        llama3.parse_llama3,
        _teaches_llama3,
        head=_json_head("parameters"),
        tail="}",
        separator="; ",
        marks=(llama3.PYTHON_TAG,),
        key="parameters",
    ),
    "pythonic": ToolFormat(
        pythonic.parse_pythonic,
        _teaches_pythonic,
        opens="[",
        closes="]",
        head="NAME(",
        tail=")",
        separator=", ",
        marks=pythonic.MARKS,
        initial="[",
        rules=pythonic.argument_rules,
        write=pythonic.written,
    ),
}
"""All formats by their name in the settings, in the order in which a template is searched for them."""
