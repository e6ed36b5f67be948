"""Finds the family of a model by the architecture that its config.json names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from engine import families
from engine.base.errors import ModelLoadError
from engine.model_parts.family import Family

FAMILIES: Mapping[str, Family] = {
    architecture: family
    for module in iter_modules(families.__path__, f"{families.__name__}.")
    for family in (import_module(module.name).FAMILY,)
    for architecture in family.architectures
}
"""The family of each supported architecture; each is a module of `engine.families`."""


def family_of(raw: Mapping[str, Any]) -> tuple[str, Family]:
    """Return the architecture that a config.json names. Raises ModelLoadError when it is not supported."""
    named, kind = raw.get("architectures"), raw.get("model_type")
    names = named if isinstance(named, list) else []
    for name in names:
        if isinstance(name, str) and name.endswith("Model"):  # saved without its output head, for embeddings
            name = f"{name.removesuffix('Model')}ForCausalLM"
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ModelLoadError(
        f"unsupported architecture {', '.join(map(str, names)) or '(none named)'} "
        f"(model_type {kind!r}); supported are {', '.join(FAMILIES)}"
    )
