"""Adds the bounds that a service's limits and models set on bodies to /openapi.json. The types of bodies are the
same for all services. Their bounds differ, and are checked after the types, with messages that name the setting:
`fields/counts.py`, `sampling/parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any, Literal

from deployments.api.batches.batches import MAX_UNITS, UNIT_S
from deployments.api.fields.field_values import MAX_ID_DIGITS
from deployments.api.fields.metadata import MAX_NAME_CHARS, MAX_PAIRS, MAX_TEXT_CHARS
from deployments.api.fields.strict_model import LEFT_OUT
from deployments.api.prompt.template_options import OWN
from deployments.api.service.api_service import ApiService
from deployments.config.files import FileSettings
from engine.values.sampling_params import (
    MAX_COUNT,
    MAX_LENGTH_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
)

Keywords = Mapping[str, Mapping[str, Any]]
"""Keywords of a JSON schema, by the type to which they are added wherever it is in a field."""
_WITH_METADATA = ("NewConversation.metadata", "ConversationChange.metadata", "NewBatch.metadata")
_VARIABLE = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"anyOf": [{"enum": [*OWN]}, {"pattern": "_token$"}]}}
_PENALTY = {"minimum": -2, "maximum": 2}
_FACTOR = {"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY}


def bounds_of(service: ApiService) -> dict[str, Keywords]:
    """Return the bounds of fields by their names, or by those of the body's type and the field. With several
    models, those of the model that allows the most.
    """
    limits, cards = service.limits, [served.card for served in service.models.values()]
    context = max(card.max_model_len for card in cards)
    last_token = max(card.vocab_size for card in cards) - 1
    token = {"minimum": 0, "maximum": last_token}
    zeros = MAX_ID_DIGITS - len(str(last_token))
    hint = {"string": {"maxLength": limits.max_hint_chars}}
    truncated = {"minimum": -1, "maximum": context, "not": {"const": 0}}
    characters = {"minLength": 1, "maxLength": limits.max_stop_string_chars}
    stops = {"array": {"maxItems": limits.max_stop_strings}, "string": characters}
    bias = {
        "maxProperties": limits.max_logit_bias,
        "propertyNames": {"pattern": f"^0{{0,{zeros}}}({_up_to(last_token)})$"},
    }
    names = {"maxProperties": MAX_PAIRS, "propertyNames": {"maxLength": MAX_NAME_CHARS}}
    metadata: Keywords = {"object": names, "string": {"maxLength": MAX_TEXT_CHARS}}
    inputs, some = {"array": {"maxItems": limits.max_inputs}}, {"array": {"minItems": 1}}
    return {
        "temperature": {"number": {"minimum": 0, "maximum": 100}},
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "top_k": _integer(-1, MAX_COUNT),
        "min_p": {"number": {"minimum": 0, "maximum": 1}},
        "repetition_penalty": {"number": _FACTOR},
        "repeat_penalty": {"number": _FACTOR},
        "presence_penalty": {"number": _PENALTY},
        "frequency_penalty": {"number": _PENALTY},
        "length_penalty": {"number": {"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY}},
        "min_tokens": _integer(0, MAX_COUNT),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _integer(1, MAX_COUNT)),
        "seed": _integer(-MAX_SEED, MAX_SEED),
        "n": _integer(1, limits.max_choices),
        "best_of": _integer(1, limits.max_best_of),
        "logprobs": _integer(0, limits.max_completion_logprobs),
        "top_logprobs": _integer(0, limits.max_top_logprobs),
        "prompt_logprobs": _integer(0, limits.max_prompt_logprobs),
        "priority": _integer(-limits.max_priority, limits.max_priority),
        "truncate_prompt_tokens": {"integer": truncated},
        "thinking_token_budget": _integer(-1, context),
        "max_tool_calls": _integer(-(2**63), 2**63 - 1),
        "dimensions": _integer(1, max(card.hidden_size for card in cards) or 1),
        "top_n": _integer(0, MAX_COUNT),
        "stop": stops,
        "stop_sequences": stops,
        "stop_token_ids": {"array": {"maxItems": limits.max_stop_token_ids}, "integer": token},
        "allowed_token_ids": {"array": {"minItems": 1}, "integer": token},
        "logit_bias": {"object": bias, "number": {"minimum": -100, "maximum": 100}},
        "cache_salt": hint,
        "prompt_cache_key": hint,
        "tokens": {"array": {"maxItems": context}, "integer": token},
        "CompletionRequest.prompt": {"integer": token, "string": {"minLength": 1}},
        "EmbeddingsRequest.input": {"integer": token},
        **dict.fromkeys(("ResponsesRequest.input", "InputTokensRequest.input"), some),
        **dict.fromkeys(("documents", "text_1", "text_2"), inputs),
        **dict.fromkeys(_WITH_METADATA, metadata),
        "chat_template_kwargs": {"object": {"propertyNames": _VARIABLE}},
        "completion_window": {"string": {"pattern": f"^({_windows(service)})$"}},
    }


def _windows(service: ApiService) -> str:
    """Return the pattern of times up to the longest that a batch may take."""
    most_s = FileSettings().max_window_s if service.spool is None else service.spool.settings.max_window_s
    counts = {unit: min(most_s // seconds, MAX_UNITS) for unit, seconds in UNIT_S.items()}
    return "|".join(f"({_up_to(count, least=1)}){unit}" for unit, count in counts.items() if count)


def bound(body: dict[str, Any], bounds: Mapping[str, Keywords]) -> None:
    """Add the bounds of a body's fields to its schema."""
    for name, field in body["properties"].items():
        own = bounds.get(name, bounds.get(f"{body['title']}.{name}", {}))
        for part in _parts(field):
            part |= own.get(part.get("type", ""), {})


def open_to_others(schema: dict[str, Any], harmless: Set[str], *, refuses: bool) -> None:
    """Have the schema of an object in requests accept its ignored fields: `harmless` ones, values without effect
    and, unless the service refuses them, all others.
    """
    left_out = schema.pop(LEFT_OUT, None)
    if left_out is not None and refuses:
        schema["not"] = left_out
    if schema.get("additionalProperties") is False:
        label = {"description": "Accepted, and changes nothing."}
        schema["patternProperties"] = {f"^({'|'.join(sorted(harmless))})$": label}
        schema["additionalProperties"] = {"enum": [None, []]} if refuses else True


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a field's schema and its parts, but not the schemas to which it refers."""
    if isinstance(schema, dict):
        yield schema
        for inner in (schema.get("items"), schema.get("additionalProperties"), *schema.get("anyOf", ())):
            yield from _parts(inner)


def _integer(least: int, most: int) -> Keywords:
    return {"integer": {"minimum": least, "maximum": most}}


def _up_to(most: int, least: Literal[0, 1] = 0) -> str:
    """Return the pattern of the digits of `least` to `most`; with 1, the first digit is no zero.

    3071 ─▶ [0-9][0-9]{0,2} | [1-2][0-9]{3} | 30[0-6][0-9]{1} | 307[0-0] | 3071
    """
    digits = str(most)
    patterns = [f"[{least}-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for at, digit in enumerate(digits):
        lowest = least if at == 0 and len(digits) == 1 else int(at == 0)
        if int(digit) > lowest:
            patterns.append(f"{digits[:at]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}")
    return "|".join([*patterns, digits])
