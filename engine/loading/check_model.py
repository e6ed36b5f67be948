"""Checks a model's files as loading them does, without reading weights: a second, instead of a failed start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.loading.load_encoder import check_settings, unused_encoder_tensors
from engine.loading.load_model import max_model_len
from engine.loading.model_directory import local_model
from engine.loading.recurrent import check_recurrent
from engine.loading.weights import unused_tensors
from engine.models.any_model import model_facts
from engine.models.encoders.config import EncoderConfig
from engine.parallel.shard import check_divides
from engine.tasks import tasks_of
from engine.tokenizer import load_tokenizer


def check_model(config: EngineConfig) -> None:
    """Raise ValueError (ModelLoadError is one) when an engine with this config could not load its models.

    Looks at what their directories hold: the configuration, the tokenizer, and the names, shapes, types and sizes
    that the weight files' headers state. Of a model on the hub, nothing is checked: it may not be here yet.
    """
    _check_one(config)
    if config.speculation is not None and config.speculation.model is not None:
        _check_one(replace(config, model=config.speculation.model, model_revision=None, speculation=None))


def _check_one(config: EngineConfig) -> None:
    directory = local_model(config.model, config.model_revision)
    if directory is None:
        return
    try:
        _check_files(config, directory)
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from None


def _check_files(config: EngineConfig, directory: Path) -> None:
    facts = model_facts(directory)
    facts.unused_keys.check(facts.architecture, config.ignored_config_keys)
    tasks = tasks_of(config.tasks, directory)
    if isinstance(facts, EncoderConfig):
        check_settings(config, facts)
        unused_encoder_tensors(directory, facts)
    else:
        max_model_len(config, facts)
        check_recurrent(config, facts)
        check_divides(facts, config.tensor_parallel_size, config.expert_parallel)
        unused_tensors(directory, facts, needs_head=tasks != ("embed",))
    load_tokenizer(directory)
