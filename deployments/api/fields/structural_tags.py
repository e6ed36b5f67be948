"""Structural tags: text in which each trigger begins one of several tags, each with content that matches its JSON
schema.

free text <function=   search>  {"text": …}   </function>   free text
          trigger     of begin    content         end
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from deployments.api.base.errors import invalid, quoted
from deployments.api.base.field_checks import at_most, check_depth
from deployments.api.fields.closed_objects import closed
from deployments.api.fields.strict_model import StrictModel
from deployments.config.limits import Limits
from engine.grammar.compiler import schema_in_lark
from engine.grammar.lark import SpecialId, reference
from engine.grammar.spec import Grammar

_MAY_BE_SPECIAL = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")


def one_of(*allowed: str) -> BeforeValidator:
    """Check that a value is one of few words, with an error that lists them."""

    def check(value: object) -> object:
        if value not in allowed:
            known = " or ".join(f'"{word}"' for word in allowed)
            raise PydanticCustomError("response_format", f"must be {known}, got {quoted(value)}")
        return value

    return BeforeValidator(check)


def _parse_schema(value: object) -> object:
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("response_format", "must be a JSON schema: an object, or true")
    return value


_Schema = Annotated[Any, BeforeValidator(_parse_schema, json_schema_input_type=dict[str, Any] | bool)]


class Structure(StrictModel):
    """A tag in vLLM's older form."""

    begin: str
    schema_: _Schema = Field(default=True, alias="schema")
    end: str


class JsonContent(StrictModel):
    """The content between the marks of a tag."""

    type: Annotated[Literal["json_schema"], one_of("json_schema")]
    json_schema: _Schema


class Tag(StrictModel):
    """A tag in XGrammar's form."""

    type: Annotated[Literal["tag"], one_of("tag")] = "tag"
    begin: str
    content: JsonContent
    end: str


class TriggeredTags(StrictModel):
    """XGrammar's format of text in which triggers begin tags."""

    type: Annotated[Literal["triggered_tags"], one_of("triggered_tags")]
    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    """Whether there must be a tag, with which the text begins."""
    stop_after_first: bool = False
    """Whether the text ends with its first tag."""


class StructuralTag(StrictModel):
    """A structural tag in either form."""

    type: Annotated[Literal["structural_tag"], one_of("structural_tag")]
    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    format: TriggeredTags | None = None


def tags_grammar(
    limits: Limits,
    structures: Sequence[Structure] | None,
    triggers: Sequence[str] | None,
    form: TriggeredTags | None,
    param: str,
    special: SpecialId,
) -> Grammar:
    """Return the grammar of text with tags, which came in field `param`. Raises `ApiError`."""
    if (form is None) == (structures is None) or (structures is None) != (triggers is None):
        raise invalid(f"{param} needs structures and triggers, or a format; give one of the two forms.", param)
    if form is not None:
        place, triggers = f"{param}.format", form.triggers
        tags = [
            (f"{place}.tags.{at}", tag.begin, tag.content.json_schema, tag.end) for at, tag in enumerate(form.tags)
        ]
    else:
        assert structures is not None and triggers is not None
        place = param
        tags = [(f"{place}.structures.{at}", one.begin, one.schema_, one.end) for at, one in enumerate(structures)]
    if not all(triggers) or not triggers:
        raise invalid(f"{place}.triggers must be an array of at least one text, and none may be empty.", place)
    if not tags:
        raise invalid(f"{place} needs at least one tag.", place)
    at_most(limits, "max_grammar_choices", place, len(tags) + len(triggers), "tags and triggers")
    rules = ["TEXT: /(?s:.*)/"]
    options: list[list[str]] = [[] for _ in triggers]
    for number, (where, begin, schema, end) in enumerate(tags):
        chosen = next((at for at, trigger in enumerate(triggers) if begin.startswith(trigger)), None)
        if chosen is None:
            raise invalid(f"{where}.begin must begin with one of triggers, got {quoted(begin)}.", f"{where}.begin")
        rest = _in_lark(begin.removeprefix(triggers[chosen]), special)
        options[chosen].append(" ".join(filter(None, (rest, f"content_{number}", _in_lark(end, special)))))
        rules.append(f"content_{number}: {schema_in_lark(_checked(limits, schema, where))}")
    used = [at for at, found in enumerate(options) if found]
    for at in used:
        known = reference(triggers[at], special)
        text = json.dumps(triggers[at], ensure_ascii=False)
        rules.append(f"trigger_{at}: TEXT {known}" if known else f"trigger_{at}[lazy]: TEXT {text}")
        rules.append(f"after_{at}: {' | '.join(options[at])}")
    one = f"({' | '.join(f'trigger_{at} after_{at}' for at in used)})"
    first = f"({' | '.join(f'{_in_lark(triggers[at], special)} after_{at}' for at in used)})"
    grammar = Grammar("lark", "\n".join([f"start: {_start(form, one, first)}", "rest: TEXT", *rules]))
    at_most(limits, "max_grammar_bytes", param, len(grammar.source.encode()), "bytes")
    return grammar


def _start(form: TriggeredTags | None, one: str, first: str) -> str:
    """Return the rule of the text; `first` is a tag without text before it."""
    must, stops = form is not None and form.at_least_one, form is not None and form.stop_after_first
    if must:
        return first if stops else f"{first} {one}* rest"
    return f"{one} | rest" if stops else f"{one}* rest"


def _checked(limits: Limits, schema: dict[str, Any] | bool, where: str) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {} if schema else {"not": {}}
    check_depth(limits, "max_schema_depth", schema, where)
    found: dict[str, Any] = closed(schema) if limits.closed_objects else schema
    return found


def _in_lark(text: str, special: SpecialId) -> str:
    """Write a text in Lark's syntax, with references to the special tokens in it; "" if it is empty."""
    parts = (part for part in _MAY_BE_SPECIAL.split(text) if part)
    return " ".join(reference(part, special) or json.dumps(part, ensure_ascii=False) for part in parts)
