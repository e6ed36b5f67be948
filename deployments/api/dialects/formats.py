"""Formats in which models write calls, and how to recognize the one that a chat template shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from deployments.api.dialects import (
    gemma,
    gemma_grammar,
    harmony,
    headed,
    keyed,
    keyed_grammar,
    listed,
    mistral,
    pythonic,
)
from deployments.api.dialects.headed import HeadedMarks
from deployments.api.dialects.keyed import KeyedMarks
from deployments.api.dialects.tool_format import ToolFormat

Taught = Callable[[str], bool]
_CALL = "<tool_call>"
"""Hermes' mark."""


def _json_head(key: str) -> str:
    return f'{{"name": "NAME", {json.dumps(key)}: '


def _teaches_hermes(template: str) -> bool:
    """Other formats use the same mark with another syntax: <function=...> (Qwen3-Coder), <arg_key> (GLM)."""
    others = ("<function=", "<arg_key>")
    return (
        _CALL in template
        and re.search(r"""\\?["']arguments\\?["']""", template) is not None
        and not any(other in template for other in others)
    )


def _teaches_llama3(template: str) -> bool:
    example = r"""\\?["']name\\?["']\s*:[^{}]{0,64}\\?["']parameters\\?["']\s*:"""
    has_headers = any(mark in template for mark in ("<|start_header_id|>", "<|header_start|>"))  # Llama 4's
    return has_headers and re.search(example, template) is not None


def _teaches_mistral(template: str) -> bool:
    """Its first templates write calls as a list."""
    return re.search(r"\[TOOL_CALLS\]\s*\[", template) is not None


def _teaches_mistral_named(template: str) -> bool:
    return mistral.MARK in template and not _teaches_mistral(template)


def _teaches_pythonic(template: str) -> bool:
    return re.search(r"\[\w+\(\w+\s*=\s*[\w'\"]+", template) is not None


def _has(*texts: str) -> Taught:
    """Return the check whether a template has all of these texts."""
    return lambda template: all(text in template for text in texts)


def _keyed(marks: KeyedMarks, is_taught: Taught) -> ToolFormat:
    """Describe a format with arguments one by one."""
    layout, opens, closes = marks.layout, marks.opens, marks.closes
    head = f"{marks.name}NAME{marks.after_name}{layout}"
    around = (opens + layout, layout + closes) if marks.name else (opens, closes)
    tail = marks.ends_call
    if not marks.encloses_all:
        head, tail, around = around[0] + head, tail + around[1], ("", "")
    return ToolFormat(
        partial(keyed.parse_keyed, marks),
        is_taught,
        head=head,
        tail=tail,
        opens=around[0],
        closes=around[1],
        marks=marks.all,
        begins=opens,
        rules=partial(keyed_grammar.argument_rules, marks),
        write=partial(keyed.written, marks),
    )


def _headed(marks: HeadedMarks, is_taught: Taught) -> ToolFormat:
    """Describe a format with names in a head of marks."""
    return ToolFormat(
        partial(headed.parse_headed, marks),
        is_taught,
        head=marks.head,
        tail=marks.tail,
        opens=marks.opens,
        closes=marks.closes,
        separator=marks.layout,
        marks=marks.all,
        begins=marks.opens,
    )


def _listed(mark: str, is_taught: Taught, *others: str, closes: str = "") -> ToolFormat:
    """Describe a format with a list of objects after a mark, which may be one of `others` as well."""
    return ToolFormat(
        partial(listed.parse_listed, (mark, *others), tuple(filter(None, [closes]))),
        is_taught,
        opens=f"{mark}[",
        closes="]",
        head=_json_head("arguments"),
        tail="}",
        separator=", ",
        marks=(mark, *others, *filter(None, [closes])),
        begins=mark,
    )


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        partial(listed.parse_listed, (_CALL,), ("</tool_call>",)),
        _teaches_hermes,
        head=f"{_CALL}\n{_json_head('arguments')}",
        tail="}\n</tool_call>",
        marks=(_CALL, "</tool_call>"),
        begins=_CALL,
    ),
    "harmony": ToolFormat(
        harmony.parse_harmony,
        _has(f"{harmony.CHANNEL}commentary", "functions."),
        head=f"{harmony.OPEN}NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}",
        tail="",
        separator=f"{harmony.CALL}{harmony.NEXT}",
        marks=harmony.MARKS,
        begins=harmony.OPEN,
    ),
    "gemma4": ToolFormat(
        gemma.parse_gemma,
        _has(f"{gemma.OPEN}{gemma.CALL}", gemma.QUOTE),
        head=f"{gemma.OPEN}{gemma.CALL}NAME{{",
        tail=f"}}{gemma.CLOSE}",
        separator="",
        marks=gemma.MARKS,
        begins=gemma.OPEN,
        rules=gemma_grammar.argument_rules,
        write=gemma.written,
    ),
    "seed_oss": _keyed(keyed.SEED, _has(keyed.SEED.opens)),
    "qwen3_coder": _keyed(keyed.QWEN3_CODER, _has("<function=", "<parameter=")),
    "minimax": _keyed(keyed.MINIMAX, _has(keyed.MINIMAX.opens)),
    "glm47": _keyed(keyed.GLM_47, _has("</arg_key><arg_value>")),
    "glm": _keyed(keyed.GLM, _has("<arg_key>")),
    "kimi": _headed(headed.KIMI, _has(*headed.KIMI.before)),
    "deepseek_v3": _headed(headed.DEEPSEEK_V3, _has(*headed.DEEPSEEK_V3.before, "```json")),
    "deepseek_v31": _headed(headed.DEEPSEEK_V31, _has(*headed.DEEPSEEK_V31.before)),
    "granite": _listed("<|tool_call|>", _has("<|tool_call|>")),
    "phi4": _listed("functools", _has("functools["), "<|tool_call|>", closes="<|/tool_call|>"),
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
        partial(listed.parse_listed, (listed.PYTHON_TAG,), (), initial="{"),
        _teaches_llama3,
        head=_json_head("parameters"),
        tail="}",
        separator="; ",
        marks=(listed.PYTHON_TAG,),
        key="parameters",
    ),
    "olmo3": ToolFormat(
        pythonic.parse_marked_pythonic,
        _has(pythonic.OPEN),
        opens=pythonic.OPEN,
        closes=pythonic.CLOSE,
        head="NAME(",
        tail=")",
        marks=(pythonic.OPEN, pythonic.CLOSE),
        begins=pythonic.OPEN,
        rules=pythonic.argument_rules,
        write=pythonic.written,
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
