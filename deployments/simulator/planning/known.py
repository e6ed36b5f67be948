"""Facts that need no network: GPUs by name, and the published shapes of some well-known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from engine.base.errors import ModelLoadError
from engine.gguf.documents import is_gguf
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import encoder_of
from engine.model_files.json_files import parse_json
from engine.model_files.model_directory import resolve_metadata
from engine.model_files.pulled_models import PULLED_MODELS


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, as its maker and CUDA describe it."""

    name: str
    title: str
    memory_gib: float
    """Total memory that CUDA reports, in GiB."""
    bandwidth_gb_s: float
    """Memory bandwidth, in 1e9 bytes per second."""
    bf16_tflops: float
    """Dense bfloat16 matrix products, in 1e12 operations per second."""
    peer_gb_s: float
    """Rate from other GPUs of its machine, in 1e9 bytes per second: by NVLink, or else PCIe."""
    source: str

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.memory_gib * 2**30)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model's facts and their source."""

    name: str
    """Directory or hub id that an engine loads."""
    facts: ModelConfig
    source: str


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return all GPUs by name."""
    return {name: Gpu(name, **fields) for name, fields in _data("gpus.yaml").items()}


def gpu_named(name: str) -> Gpu:
    """Return one GPU. Raises ValueError for an unknown name."""
    found = gpus().get(name.lower())
    if found is None:
        raise ValueError(f"unknown GPU {name!r}; choose one of {', '.join(gpus())}")
    return found


def known_models() -> Mapping[str, Any]:
    """Return the known models by hub id: `source`, `parameters` (as published) and `config` (of config.json)."""
    return _data("models.yaml")


def planned_model(model: str, config: Path | None = None) -> PlannedModel:
    """Return the facts of `model` from `config` (a config.json or its directory), else from its own directory,
    the models known here, or the hub. Raises ModelLoadError that lists the attempts.
    """
    if config is not None:
        path = config / "config.json" if config.is_dir() else config
        if not path.exists():
            raise ModelLoadError(
                f"there is no file {path}: --config takes a model's config.json, or its directory"
            )
        _check_generates(model, path)
        return PlannedModel(model, ModelConfig.from_file(path), str(path))
    if model == "demo" or model in PULLED_MODELS or Path(model).expanduser().exists():
        directory = resolve_metadata(model)
        source = directory if is_gguf(directory) else directory / "config.json"
        _check_generates(model, source)
        return PlannedModel(model, ModelConfig.from_directory(directory), str(source))
    if (name := _known_name(model)) is not None:
        known = known_models()[name]
        return PlannedModel(name, ModelConfig.from_json(known["config"], {}, name), known["source"])
    try:
        directory = resolve_metadata(model)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"cannot plan for {model}: it is not a directory here, not one of the models that Raydix knows "
            f"({', '.join(known_models())}), and: {error}. Give its config.json with --config, or a directory."
        ) from None
    _check_generates(model, directory / "config.json")
    return PlannedModel(model, ModelConfig.from_directory(directory), f"the hub's {model}/config.json")


def _check_generates(model: str, config: Path) -> None:
    """Raise ModelLoadError if a config.json describes an encoder."""
    try:
        encoder = encoder_of(parse_json(config))
    except (OSError, ValueError):
        return  # the error is raised when the file is read as a generating model's
    if encoder is not None:
        raise ModelLoadError(
            f"there is nothing to plan for {model}: {encoder} is an encoder, which keeps no KV and runs wherever "
            "its weights and a step of engine.max_step_tokens tokens fit; see `raydix info`"
        )


def _known_name(model: str) -> str | None:
    """Return the known hub id that `model` names, ignoring case; its owner may be omitted."""
    asked = model.lower()
    for name in known_models():
        if asked in (name.lower(), name.lower().rpartition("/")[2]):
            return name
    return None


@cache
def _data(name: str) -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = yaml.safe_load(
        files("deployments.simulator.planning").joinpath(name).read_text(encoding="utf-8")
    )
    return loaded
