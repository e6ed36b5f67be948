"""Treats unknown fields of objects within a request like those of the request itself.

The models say which objects exist. If a field accepts several models, `type` selects one:

    {"reasoning": {"effort": "low", "x": 1}}   ─▶   {"reasoning": {"effort": "low"}}, and "reasoning.x" is named
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args, get_origin

from deployments.api.fields.ignored import IgnoredFields, keep_known
from deployments.api.fields.strict_model import StrictModel

Models: TypeAlias = tuple[type[StrictModel], ...]


def keep_known_within(
    kind: type[StrictModel], fields: Mapping[str, Any], ignored: IgnoredFields, path: str = ""
) -> dict[str, Any]:
    """Return the fields of a `kind`, at `path`, with only known fields in the objects that they have.

    Raises `ApiError` 400 as `keep_known` does.
    """
    kept = dict(fields)
    for name, models in _objects_of(kind).items():
        if name in kept and not _is_known(models, kept[name]):
            kept[name] = _taken(models, kept[name], ignored, path + name)
    return kept


def _is_known(models: Models, value: object) -> bool:
    """Whether objects have only known fields, as nearly all do. Fast, because conversations have thousands."""
    if isinstance(value, list):
        for each in value:
            if not _is_known(models, each):
                return False
    elif isinstance(value, dict) and (kind := _meant(models, value)) is not None:
        if not value.keys() <= _names_of(kind):
            return False
        for name, inner in _objects_of(kind).items():
            if name in value and not _is_known(inner, value[name]):
                return False
    return True


def _taken(models: Models, value: object, ignored: IgnoredFields, path: str) -> object:
    if isinstance(value, list):
        return [
            each if _is_known(models, each) else _taken(models, each, ignored, f"{path}.{index}")
            for index, each in enumerate(value)
        ]
    if not isinstance(value, dict) or (kind := _meant(models, value)) is None:
        return value
    known = keep_known(value, _names_of(kind), kind.unsupported, ignored, f"{path}.")
    return keep_known_within(kind, known, ignored, f"{path}.")


def _meant(models: Models, value: Mapping[str, Any]) -> type[StrictModel] | None:
    """Return the model that an object has; None if it has none of them; pydantic then reports this."""
    if len(models) == 1:
        return models[0]
    given = value.get("type")
    return _by_type(models).get(given) if given is None or isinstance(given, str) else None


@cache
def _by_type(models: Models) -> dict[str | None, type[StrictModel]]:
    """Return the models by the types of their objects, and by None the one whose objects may omit the type."""
    found: dict[str | None, type[StrictModel]] = {}
    for kind in models:
        field = kind.model_fields["type"]
        named = chain.from_iterable(get_args(each) for each in (field.annotation, *get_args(field.annotation)))
        found |= dict.fromkeys((name for name in named if isinstance(name, str)), kind)
        if not field.is_required():
            found[None] = kind
    return found


@cache
def _names_of(kind: type[StrictModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@cache
def _objects_of(kind: type[StrictModel]) -> dict[str, Models]:
    """Return the models of the objects that fields of a model have, or have arrays of."""
    found = {
        field.alias or name: tuple(dict.fromkeys(_models_in(field.annotation)))
        for name, field in kind.model_fields.items()
    }
    return {name: models for name, models in found.items() if models}


def _models_in(annotation: Any) -> Iterator[type[StrictModel]]:
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        yield annotation
    elif get_origin(annotation) not in (None, Literal, dict):
        for part in get_args(annotation):
            yield from _models_in(part)
