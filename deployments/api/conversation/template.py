"""Renders conversations with a model's chat template, which is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from secrets import token_hex
from types import MappingProxyType
from typing import Any

from deployments.api.base import exact_json
from deployments.config.settings import ChatSettings
from engine.text.tokenizer import Tokenizer

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class TemplateRefused(ValueError):
    """The chat template cannot render these messages. The error's text may be shown to the client."""


class TemplateRunaway(TemplateRefused):
    """The chat template takes too long, or makes too much, of these messages. It is at fault, not the client."""


class ChatTemplate:
    """A tokenizer's chat template.

    `apply_chat_template` copies and checks its input, which doubles the cost of the rendering. Requests are
    checked and plain JSON already, so they go to the same compiled template directly.
    """

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings | None = None) -> None:
        """`settings` bound each rendering."""
        self._tokenizer: Any = tokenizer
        self._settings = settings or ChatSettings()
        self._variables = dict(getattr(tokenizer, "special_tokens_map", {}))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continues: bool = False,
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> str:
        """Return the conversation as text. No value in a message may be None. Raises `TemplateRefused`.

        With `continues`, the text ends within the last message. `variables` are further ones of the template.
        """
        from jinja2.exceptions import TemplateError, TemplateSyntaxError, UndefinedError

        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise TemplateRefused("This model has no chat template; use /v1/completions.") from error
        end = f"e{token_hex(8)}e" if continues else ""
        if continues:
            messages = [*messages[:-1], _open_ended(messages[-1], f"{end} ")]
        from deployments.api.conversation.bounded_rendering import TemplateLimit, bounded

        try:
            with bounded(self._settings.max_rendered_chars, self._settings.template_timeout_s):
                rendered = _compiled(template).render(
                    messages=[_with_reasoning(message) for message in messages],
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    **{"documents": None, **variables, **self._variables},
                )
        except TemplateLimit as error:
            raise TemplateRunaway(f"The model's chat template cannot be rendered: {error}.") from None
        except TemplateError as error:
            if isinstance(error, TemplateSyntaxError | UndefinedError):
                raise TemplateRefused("The model's chat template cannot render these messages.") from error
            raise TemplateRefused(f"The model's chat template refuses these messages: {error}.") from error
        except (
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:  # from a filter that expects another type
            raise TemplateRefused("The model's chat template cannot render these messages.") from error
        return _up_to(str(rendered), end) if continues else str(rendered)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    compiled = _environment().from_string(template)
    compiled.globals = dict(compiled.globals)  # Each rendering copies them: a dict is faster than a ChainMap.
    return compiled


@cache
def _environment() -> Any:
    """Return transformers' sandbox, which has the functions that templates use, with bounds."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from deployments.api.conversation.bounded_rendering import BoundedEnvironment

    environment: Any = _compile_jinja_template("").environment
    environment.filters["tojson"] = _to_json
    environment = BoundedEnvironment.bound(environment)
    environment.getattr = _fields_first(environment.getattr)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, as transformers' filter of this name does, with numbers as they were written."""
    return exact_json.write(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _fields_first(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return an environment's `getattr` with a shortcut for the fields of messages, which templates read most."""

    def field_or_attribute(value: Any, name: str) -> Any:
        if type(value) is dict and name in value and name not in _OF_DICTS:
            return value[name]
        return get(value, name)

    return field_or_attribute


_OF_DICTS = frozenset(dir(dict))
"""Attributes that dictionaries have by themselves, which come before their fields."""


def _open_ended(message: dict[str, Any], end: str) -> dict[str, Any]:
    return {**message, "content": message["content"] + end}


def _up_to(rendered: str, end: str) -> str:
    """Return the text before the mark `end`. A template that strips messages has stripped the blank after it."""
    before, found, after = rendered.rpartition(end)
    if not found:
        raise TemplateRefused(
            "The model's chat template changes the last message, so that message cannot be continued."
        )
    return before if after.startswith(" ") else before.rstrip()


def template_text(tokenizer: Any) -> str:
    """Return the template's source, preferring the one for tools, or "" if there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=[]))
    except (AttributeError, ValueError):
        return ""


def all_template_texts(tokenizer: Any) -> str:
    """Return the sources of all of a tokenizer's templates."""
    known = getattr(tokenizer, "chat_template", None)
    texts = known.values() if isinstance(known, dict) else [known or ""]
    return "\n".join([template_text(tokenizer), *map(str, texts)])


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the name that gpt-oss' template reads, too."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}
