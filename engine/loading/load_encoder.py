"""Loads the encoder that an engine's settings name."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from engine.base.machine import default_threads
from engine.loading.checkpoint import open_checkpoint
from engine.loading.contents import check_encoder_tensors
from engine.loading.devices import device_named, dtype_of
from engine.loading.encoder_targets import encoder_prefix, encoder_targets
from engine.loading.model_settings import check_encoder_settings
from engine.loading.tensor_groups import Expected, TensorGroup
from engine.loading.unused import Unused
from engine.loading.weights import allocate, read_groups
from engine.model_config.encoder import EncoderConfig
from engine.model_files.model_directory import fingerprint, resolve_model
from engine.models.encoders.encoder import EncoderModel
from engine.runner.encoder_runner import EncoderRunner
from engine.settings.config import EngineConfig

logger = logging.getLogger(__name__)


def load_encoder(config: EngineConfig) -> EncoderRunner:
    """Load the encoder that `config` names. Raises ModelLoadError; ValueError for decoders' settings."""
    torch.set_num_threads(config.threads or default_threads(1))
    directory = resolve_model(config.model, config.model_revision)
    model = EncoderConfig.from_directory(directory)
    model.unused_keys.check(model.architecture, config.ignored_config_keys)
    check_encoder_settings(config, model)
    device = device_named(config.device)
    dtype = dtype_of(config.dtype, model.dtype, device)
    encoder = load_encoder_weights(directory, model, dtype, device)
    longest = config.max_model_len or model.max_position_embeddings
    runner = EncoderRunner(model, encoder, longest, config.max_running, config.page_size, device)
    runner.fingerprint = fingerprint(directory)
    numbers = sum(parameter.numel() for parameter in encoder.parameters())
    logger.info("%s: %.1fM parameters, %s on %s, an encoder", model.architecture, numbers / 1e6, dtype, device)
    return runner


def load_encoder_weights(
    directory: Path, config: EncoderConfig, dtype: torch.dtype, device: torch.device
) -> EncoderModel:
    """Load the weights, after checking all names, shapes and types. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors = open_checkpoint(directory, stack)
        with torch.device("meta"):
            encoder = EncoderModel(config)
        groups = []
        for name, target in encoder_targets(config, encoder_prefix(tensors)).items():
            assert isinstance(target.rows, slice), "nothing is stacked"
            into = partial(_rows, encoder, target.parameter, target.rows)
            groups.append(TensorGroup((Expected(name, target.shape),), partial(_store, into), into))
        expected = [tensor for group in groups for tensor in group.tensors]
        Unused.of(directory, config.unused_keys, check_encoder_tensors(tensors, expected, config)).log(directory)
        allocate(encoder, partial(torch.empty, device=device), dtype)
        read_groups(directory, tensors, groups, device)
    return encoder.eval()


def _rows(encoder: EncoderModel, parameter: str, rows: slice) -> torch.Tensor:
    return encoder.get_parameter(parameter).detach()[rows]


def _store(into: partial[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    into().copy_(tensors[0])
