"""Checks a model's files as loading them does, without reading weights: a second, instead of a failed start."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from engine.gguf.files import SUFFIX
from engine.loading.checkpoint import open_checkpoint
from engine.loading.eagle3_targets import eagle3_targets
from engine.loading.model_settings import check_encoder_settings, check_recurrent, max_model_len
from engine.loading.mtp_targets import check_mtp, check_mtp_tensors
from engine.loading.unused_tensors import unused_encoder_tensors, unused_tensors
from engine.model_config.any_model import model_facts
from engine.model_config.config import ModelConfig
from engine.model_config.eagle3 import Eagle3Config
from engine.model_config.encoder import EncoderConfig
from engine.model_config.tasks import Task, tasks_of
from engine.model_files.model_directory import described_on_hub, gguf_on_hub, local_model
from engine.model_files.weight_files import weight_files
from engine.parallel.division import stages_of
from engine.parallel.shard import check_context, check_copies, check_divides
from engine.settings.config import EngineConfig
from engine.text.tokenizer import load_tokenizer


def check_model(config: EngineConfig) -> None:
    """Raise ValueError, including ModelLoadError, if an engine with this config could not load its models.

    Checks the files in their directories: the configuration, the tokenizer, and the names, shapes, types and sizes
    in the weight files' headers. Of a model on the hub, it checks only the configuration and the names of its
    files, unless the hub cannot be reached and an engine would use the copy in the local cache; of a GGUF file
    there, only its name.
    """
    _check_one(config)
    settings = config.speculation
    if settings is None or settings.model is None:
        return
    if settings.method == "draft_model":
        _check_one(config.of_draft_model(settings.model))
    else:
        _check_eagle3(config, settings.model)


def _check_eagle3(config: EngineConfig, name: str) -> None:
    """Check an EAGLE-3 checkpoint; of one on the hub only its configuration, and whether there are weights."""
    directory, names = local_model(name), None
    if directory is None:
        directory, names = described_on_hub(name)
    eagle = Eagle3Config.from_directory(directory, config.ignored_config_keys)
    if (model := _described(config)) is not None:
        eagle.check_fits(model)
    if names is not None:
        weight_files(directory, names)
        return
    with ExitStack() as stack:
        eagle3_targets(eagle, open_checkpoint(directory, stack, is_read=False))


def _described(config: EngineConfig) -> ModelConfig | None:
    """Return the model's configuration; None for a GGUF file on the hub, which would have to be downloaded."""
    directory = local_model(config.model, config.model_revision)
    if directory is None and not config.model.endswith(SUFFIX):
        directory, _ = described_on_hub(config.model, config.model_revision)
    return None if directory is None else ModelConfig.from_directory(directory)


def _check_one(config: EngineConfig) -> None:
    directory, names = local_model(config.model, config.model_revision), None
    if directory is None and config.model.endswith(SUFFIX):
        directory = gguf_on_hub(config.model, config.model_revision)
        if directory is None:  # Only the file itself describes the model, and a check does not download it.
            return
    elif directory is None:
        directory, names = described_on_hub(config.model, config.model_revision)
    try:
        if names is None:
            _check_files(config, directory)
        else:
            _check_names(config, directory, names)
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from None


def _check_names(config: EngineConfig, directory: Path, names: Collection[str]) -> None:
    """Check a model by its description; `names` are its files, which are elsewhere."""
    try:
        _check_settings(config, directory)
        weight_files(directory, names)
        if not any(name.startswith(("tokenizer", "vocab")) for name in names):
            raise ValueError("it has no usable tokenizer: expected tokenizer.json and tokenizer_config.json")
    except ValueError as error:
        raise ValueError(f"{config.model} on the hub: {error}") from None


def _check_files(config: EngineConfig, directory: Path) -> None:
    facts, tasks = _check_settings(config, directory)
    if isinstance(facts, EncoderConfig):
        unused_encoder_tensors(directory, facts)
    else:
        unused = unused_tensors(directory, facts, needs_head=tasks != ("embed",))
        if config.speculation is not None and config.speculation.method == "mtp":
            check_mtp_tensors(facts, unused, directory)
    load_tokenizer(directory)


def _device(config: EngineConfig) -> str:
    """Return "cpu" or "cuda", without importing torch where no driver is loaded."""
    if config.device != "auto":
        return config.device.partition(":")[0]
    if not Path("/dev/nvidiactl").exists():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_settings(config: EngineConfig, directory: Path) -> tuple[ModelConfig | EncoderConfig, tuple[Task, ...]]:
    facts = model_facts(directory)
    facts.unused_keys.check(facts.architecture, config.ignored_config_keys)
    tasks = tasks_of(config.tasks, directory)
    if isinstance(facts, EncoderConfig):
        check_encoder_settings(config, facts)
    else:
        facts = facts.on(_device(config))
        max_model_len(config, facts)
        check_recurrent(config, facts)
        check_mtp(config, facts)
        check_divides(facts, config.tensor_parallel_size, config.expert_parallel)
        check_context(facts, config.tensor_parallel_size, config.context_parallel_size)
        check_copies(facts, config)
        stages_of(facts, config)
    return facts, tasks
