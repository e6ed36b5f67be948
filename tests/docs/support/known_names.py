"""Collects all names that a page may use: settings, metrics, commands with their options, endpoints."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

import typer.main
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from starlette.routing import Route
from typer.core import TyperGroup
from typer.exceptions import TyperException

from deployments.api import ApiService
from deployments.api.application.app import route_table
from deployments.cli.app import app as raydix
from deployments.config.args import AppArgs, ModelArgs
from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.kv_events import KvEventSettings
from deployments.config.roles import RoleSettings
from deployments.config.shared_prefixes import SharedPrefixSettings
from deployments.config.tenants import TenantSettings
from deployments.config.versions import RolloutSettings
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.settings.kv_tier import KVTier
from monitoring.metric_table import METRICS, PREFIX

REQUIRED = object()
"""The default of a setting that has none."""
_OPTIONAL: tuple[type[BaseModel], ...] = (AutoscalingSettings, KvEventSettings, RoleSettings, RolloutSettings)
"""Sections that are off unless they are given."""
_LISTS: Mapping[str, type[BaseModel] | None] = {
    "tenants": TenantSettings,
    "shared_prefixes": SharedPrefixSettings,
    "models": None,
}
"""Lists of objects; a model's own settings are those of `engine` and `engines` at the top."""

_OF_ENGINES = {"speculation": Speculation, "kv_tier": KVTier}
"""Parts of an engine's settings that are None by default, and what each is when it is given."""


@cache
def settings() -> dict[str, Any]:
    """Every setting of an application's `args` by its path, as `engine.page_size`, with its default."""
    found = dict(_settings(AppArgs))
    of_models = _settings(ModelArgs, None, "models[].")
    found.update((path, value) for path, value in of_models if path.split(".")[1] not in AppArgs.model_fields)
    return found


def _settings(
    model: type[BaseModel], values: BaseModel | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, info in model.model_fields.items():
        default = getattr(values, name) if values is not None else info.get_default(call_default_factory=True)
        path = f"{prefix}{name}"
        if isinstance(default, BaseModel):
            yield from _settings(type(default), default, f"{path}.")
        elif isinstance(default, EngineConfig):
            yield from _fields(EngineConfig, path)
        elif name in _LISTS:
            yield from _settings(kind, None, f"{path}[].") if (kind := _LISTS[name]) else ()
        elif section := next((one for one in _OPTIONAL if one in get_args(info.annotation)), None):
            yield from _settings(section, None, f"{path}.")
        else:
            yield path, REQUIRED if default is PydanticUndefined else default


def _fields(kind: type[Any], path: str) -> Iterator[tuple[str, Any]]:
    """The settings of a dataclass, and those of its optional parts."""
    for field in dataclasses.fields(kind):
        if field.name in _OF_ENGINES:
            yield from _fields(_OF_ENGINES[field.name], f"{path}.{field.name}")
        else:
            yield f"{path}.{field.name}", REQUIRED if field.default is dataclasses.MISSING else field.default


@cache
def metric_names() -> set[str]:
    """Every series' name, with what Prometheus appends to histograms."""
    names = {PREFIX + metric.name for metric in METRICS}
    parts = {
        f"{PREFIX}{m.name}_{part}" for m in METRICS if m.kind == "histogram" for part in ("bucket", "sum", "count")
    }
    return names | parts


@cache
def routes() -> dict[str, list[re.Pattern[str]]]:
    """Paths that the API answers, by method, as patterns."""

    class Anything:
        """Stands for what routes would call; none is called here."""

    service: Any = ApiService({}, Anything, cluster=Anything(), rollouts=Anything())  # type: ignore[arg-type]
    found: dict[str, list[re.Pattern[str]]] = {}
    for route in route_table(service).app({}).routes:
        if isinstance(route, Route):
            pattern = re.compile(re.sub(r"\{[^}]*\}", "[^/]+", route.path))
            for method in route.methods or ():
                found.setdefault(method, []).append(pattern)
    return found


@cache
def _raydix() -> Any:
    return typer.main.get_command(raydix)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` begin with, and its arguments. Raises LookupError when there is none."""
    command = _raydix()
    while isinstance(command, TyperGroup):
        name, *words = words or [""]
        if name not in command.commands:
            raise LookupError(f"there is no command {name!r}")
        command = command.commands[name]
    return command, words


def command_problem(words: list[str]) -> str | None:
    """Return what is wrong with the arguments of a `raydix` command line; None when it is accepted."""
    try:
        command, arguments = find_command(words)
        command.make_context(command.name, list(arguments))
    except (LookupError, TyperException) as error:
        return str(error)
    return None


@cache
def options(command: Any = None) -> set[str]:
    """All options of a command and its subcommands; of `raydix` when none is given."""
    command = command or _raydix()
    own = {name for param in command.params for name in param.opts + param.secondary_opts if name.startswith("--")}
    inner = command.commands.values() if isinstance(command, TyperGroup) else ()
    return own.union({"--help"}, *(options(one) for one in inner))


def raydix_calls(text: str) -> Iterator[list[str]]:
    """The arguments of every call of `raydix` in shell text."""
    for words in shell_lines(text):
        for index, word in enumerate(words):
            is_command = index == 0 or set(words[index - 1]) <= set("|&;(")
            if is_command and (word == "raydix" or word.endswith("/raydix")):
                call = words[index + 1 :]
                ends = [at for at, one in enumerate(call) if set(one) <= set("|&;<>()")]
                yield call[: ends[0]] if ends else call


def shell_lines(text: str) -> Iterator[list[str]]:
    """The words of each line of shell text, prompts and comments left out, continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^[$>] ", "", text, flags=re.MULTILINE))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            yield list(lexer)
        except ValueError:  # a quoted text of several lines
            yield line.split()
