"""Loads a model and its layer for multi-token prediction on one device, with KV pages for both."""

from __future__ import annotations

from engine.attention.base import AttentionShape, choose_backend
from engine.attention.kv_pages import KVPages
from engine.loading.devices import device_named, dtype_of
from engine.loading.load_model import load_model
from engine.loading.load_mtp import load_mtp, share_tables
from engine.loading.model_settings import max_model_len
from engine.loading.mtp_targets import check_mtp
from engine.loading.warm_up import compile_kernels, warm_steps, warm_up
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import resolve_model
from engine.runner.hidden_states import HiddenStates
from engine.runner.model_runner import ModelRunner
from engine.runner.mtp_drafter import MTPDrafter, MTPRunner
from engine.settings.config import EngineConfig


def load_with_mtp(config: EngineConfig) -> tuple[ModelRunner, MTPDrafter]:
    """Load the model that `config` names, and its MTP layer. Raises ModelLoadError, ValueError.

    The layer's weights are loaded first, so that KV gets the memory that both leave free. If the layer has as many
    pages as the model, a page counts with the memory of both.
    """
    settings = config.speculation
    assert settings is not None
    directory, device = resolve_model(config.model, config.model_revision), device_named(config.device)
    model = ModelConfig.from_directory(directory)
    check_mtp(config, model)
    limit = max_model_len(config, model)
    model, dtype = model.for_context(limit).on(device.type), dtype_of(config.dtype, model.dtype, device)
    decoder = load_mtp(directory, model, dtype, device, fp8=config.quantization == "fp8")
    layer, windows = decoder.config, decoder.config.windows
    shape = AttentionShape.of(layer.attention, windows, config.page_tokens, dtype, is_cascade=False)
    attention = choose_backend(config.attention, shape, dtype, device)
    mtp = MTPRunner(layer, decoder, attention, KVPages.of(layer, 1, config.page_size, dtype, device))
    mtp.max_model_len = limit
    hidden = HiddenStates(settings.max_prefill_tokens)
    kept = config.max_running * settings.max_prefill_tokens * layer.hidden_size * dtype.itemsize
    if settings.kv_pages is not None:
        runner, num_pages = load_model(config, draft_bytes=kept), settings.kv_pages
    else:
        runner = load_model(config, mtp.kv_bytes_per_token, draft_bytes=kept)
        num_pages = runner.num_pages
    runner.on_hidden = hidden.add
    share_tables(decoder, runner.decoder, directory, dtype, device)
    mtp = mtp.with_pages(num_pages)
    steps = [*warm_steps(min(config.max_step_tokens, settings.max_prefill_tokens), limit, config.page_tokens)]
    compile_kernels(mtp, iter(steps), device)
    warm_up(mtp, iter(steps), device)
    return runner, MTPDrafter(mtp, hidden, runner.decoder.normed, model.eos_token_ids, settings.max_prefill_tokens)
