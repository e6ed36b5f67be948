"""Loads the model that an engine's settings name: its decoder, weights, KV pages and CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch

from engine.attention.base import AttentionBackend, AttentionShape, choose_backend
from engine.attention.by_heads import AttentionByHeads, KVShape
from engine.attention.chunked import ChunkedAttention
from engine.attention.expanded import ExpandingAttention
from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import FP8, KVPages
from engine.attention.layer_groups import GroupedAttention, shapes
from engine.attention.state_slots import StateSlots
from engine.base.errors import ModelLoadError
from engine.base.machine import default_threads
from engine.graphs.setup import (
    Graphs,
    capture_all,
    draft_widths,
    graph_bytes,
    piece_tokens,
    why_none,
    why_not,
)
from engine.graphs.step_graphs import CudaCapture
from engine.loading.devices import device_named, dtype_of
from engine.loading.kv_memory import (
    available_ram,
    check_room,
    free_after_slots,
    host_pages_for,
    pages_for,
    slots_for,
)
from engine.loading.kv_scales import KVScaleCalibration
from engine.loading.model_settings import check_recurrent, max_drafts, max_model_len
from engine.loading.product_choice import choose_products
from engine.loading.stage_times import report_stages
from engine.loading.step_memory import measure_step
from engine.loading.warm_up import compile_kernels, prompt_steps, warm_steps, warm_up
from engine.loading.weights import load_decoder, prefers_input_major
from engine.loading.windowed import layer_groups
from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.model_config.tasks import tasks_of
from engine.model_files.model_directory import fingerprint, resolve_model
from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder, unsupported
from engine.parallel.collective import ALONE, Collective
from engine.parallel.context_attention import ContextParallelAttention
from engine.runner.model_runner import ModelRunner
from engine.runner.stage_runner import StageRunner
from engine.settings.config import EngineConfig
from engine.values.plan import StepPlan

logger = logging.getLogger(__name__)


def load_model(
    config: EngineConfig,
    draft_kv_bytes: int = 0,
    ranks: Collective = ALONE,
    *,
    draft_bytes: int = 0,
    inner_layers: tuple[int, ...] = (),
    load_weights: Callable[..., Decoder] = load_decoder,
) -> ModelRunner:
    """Load the model that `config` names and allocate its KV pages. Raises ModelLoadError, ValueError.

    `draft_kv_bytes`: bytes that another model keeps for each token in the pages; `draft_bytes`: other bytes of
    the device that it will take. With several `ranks`, all of them call this together and each loads its share.
    `inner_layers` are those of `Decoder.inner_layers`. `load_weights` has the signature of `load_decoder`.
    """
    torch.set_num_threads(config.threads or default_threads(ranks.size))
    loading = _Loading(config, draft_kv_bytes, ranks, draft_bytes, inner_layers)
    small = loading.with_a_page(load_weights)
    loading.compile_kernels(small)
    runner, is_graphed = loading.with_all_pages(small)
    if is_graphed:
        loading.add_graphs(runner)
    loading.warm_up(runner)
    loading.report_stages(runner)
    if runner.expert_load is not None:
        runner.expert_load.counts.zero_()  # without the tokens of the start
    runner.add_host_pages(loading.num_host_pages(runner))
    if config.kv_tier is not None and ranks.rank == 0:
        runner.add_lower_tier(config.kv_tier)
    loading.report(runner)
    return runner


class _Loading:
    """The settings resolved for this model on this device, and the steps from there to a runner."""

    def __init__(
        self,
        config: EngineConfig,
        draft_kv_bytes: int,
        ranks: Collective,
        draft_bytes: int = 0,
        inner_layers: tuple[int, ...] = (),
    ) -> None:
        self._config, self._draft_kv_bytes, self._ranks = config, draft_kv_bytes, ranks
        self._inner_layers = inner_layers
        self._device = device_named(config.device)
        self._directory: Path = resolve_model(config.model, config.model_revision)
        self._whole = ModelConfig.from_directory(self._directory)
        self._whole.unused_keys.check(self._whole.architecture, config.ignored_config_keys)
        self._limit = max_model_len(config, self._whole)
        self._whole = self._whole.for_context(self._limit).on(self._device.type)
        self._shard = ranks.shard.of(self._whole)
        """The shape of all layers on a rank of each stage."""
        self._model = model = ranks.stage.of(self._shard)
        self._runner = ModelRunner if ranks.stage.count == 1 else StageRunner
        self._dtype = dtype_of(config.dtype, model.dtype, self._device)
        self._kv_dtype = FP8 if config.kv_dtype == "fp8" else self._dtype
        kinds = self._kinds()
        heads = next(iter(kinds.values()))
        self._backend = self._attention(heads) if len(kinds) == 1 else self._by_heads(kinds)
        check_recurrent(config, self._whole)
        self._ungrouped = self._backend
        groups = layer_groups(config, self._whole, self._limit)
        self._groups = None if isinstance(groups, str) else groups
        self._not_grouped = groups if isinstance(groups, str) else ""
        self._all_groups = self._groups
        if self._groups is not None:
            self._groups = self._groups.part(ranks.stage.layers(self._whole.num_layers))
            whole, windowed = shapes(heads)
            self._backend = GroupedAttention(self._choose(whole), self._attention(windowed))
        self._not_graphed = why_not(config, self._backend, self._device)
        self._has_decodes = self._not_graphed is None and ranks.stage.count == 1
        self._is_graphed = why_none(config, self._device) is None
        self._reserved, self._draft_bytes = 0, draft_bytes
        if self._is_graphed:
            self._reserved = graph_bytes(
                config,
                model,
                self._dtype.itemsize,
                self._limit,
                is_planned=self._backend.plans_by_bounds,
                spreads_prompts=self._backend.spreads_prompts,
                num_groups=self._num_groups,
            )

    def _kinds(self) -> dict[KVShape, AttentionShape]:
        """Return the shape of attention for each kind of heads that the model's layers have."""
        config, is_cascade = self._config, self._config.cascade_attention == "auto"
        return {
            kind: AttentionShape.of(heads, windows, config.page_tokens, self._kv_dtype, is_cascade)
            for kind, (heads, windows) in self._model.kinds_of_heads.items()
        }

    def _by_heads(self, kinds: Mapping[KVShape, AttentionShape]) -> AttentionBackend:
        return AttentionByHeads({kind: self._attention(heads) for kind, heads in kinds.items()})

    def _attention(self, heads: AttentionShape) -> AttentionBackend:
        """Return the backend for layers with such heads, within chunks if the model has them."""
        if self._ranks.context is not None:
            ring_tokens = self._config.ring_attention_tokens
            return ContextParallelAttention(self._choose, heads, self._ranks.context, ring_tokens)
        backend = self._choose(heads)
        if heads.latent is not None and self._device.type == "cuda":
            return ExpandingAttention(backend, heads)
        if self._model.chunk is None:
            return backend
        return ChunkedAttention(backend, self._model.chunk, self._config.page_tokens)

    def _choose(self, heads: AttentionShape) -> AttentionBackend:
        return choose_backend(self._config.attention, heads, self._dtype, self._device)

    @property
    def _num_groups(self) -> int:
        return 1 if self._groups is None else self._groups.num_groups

    def with_a_page(self, load_weights: Callable[..., Decoder]) -> ModelRunner:
        """Load the model with the least memory for KV."""
        decoder = self._decoder(load_weights)
        if isinstance(decoder, Decoder):
            choose_products(decoder, self._device)
            if self._config.expert_parallel and self._ranks.shard.size > 1 and self._ranks.rank == 0:
                decoder.count_experts()
            if self._config.expert_copies:
                decoder.copy_experts(self._config.expert_copies)
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # of the stacks without slots for copies, where no larger one fits
        pages = self._pages(self._num_groups, self._kv_dtype, self._groups)
        runner = self._runner(self._model, decoder, self._backend, pages, self._ranks, self._groups)
        runner.max_model_len = self._limit
        runner.fingerprint = fingerprint(self._directory, self._config.quantization, self._config.kv_dtype)
        if len(set(self._ranks.all_of(int(runner.fingerprint[:15], 16), self._device))) > 1:
            raise ModelLoadError(
                f"the files in {self._directory} differ between the hosts of its ranks; copy them from one"
            )
        if self._kv_dtype == FP8:
            assert isinstance(decoder, Decoder), "the native kernels have no such pages"
            self._find_scales(decoder)
        return runner

    def compile_kernels(self, runner: ModelRunner) -> None:
        """Compile the kernels that steps launch before any step runs, on a GPU."""
        compile_kernels(runner, self._warm_steps(), self._device)

    def warm_up(self, runner: ModelRunner) -> None:
        """Run a step of each kind, and a prompt of each length for which cuDNN plans, on a GPU."""
        planned: Iterator[StepPlan] = iter(())
        if "cudnn" in self._backend.name:
            from engine.attention.cudnn import planned_lengths

            longest = min(self._config.max_step_tokens, self._limit - 1)
            planned = prompt_steps(planned_lengths(longest), self._config.page_tokens)
        warm_up(runner, chain(self._warm_steps(), planned), self._device)

    def _warm_steps(self) -> Iterator[StepPlan]:
        return warm_steps(self._config.max_step_tokens, self._limit, self._config.page_tokens)

    def with_all_pages(self, small: ModelRunner) -> tuple[ModelRunner, bool]:
        """Return a runner with all pages that fit, and whether it gets graphs, for which there is one more page
        and one more slot for a state.
        """
        config, size = self._config, self._ranks.size
        if config.kv_pages is not None or self._device.type == "cpu":
            free = available_ram() // size if config.kv_pages is None else 0
        else:
            free = measure_step(
                config,
                self._limit,
                lambda pages: small.with_pages(pages * self._num_groups, max_drafts=max_drafts(config)),
                self._device,
            )
        per_token = small.kv_bytes_per_token + self._draft_kv_bytes
        other = self._reserved + self._draft_bytes
        if config.host_kv_gib and self._device.type == "cuda":
            other += HostKVPages.device_bytes(
                config.page_size * _in_a_page(self._groups, small.kv_bytes_per_token)
            )
        free = max(0, free - other)
        slots, state_bytes = 0, self._model.state_bytes(self._dtype.itemsize, max_drafts(config))
        if self._shard.delta_net is not None:  # All stages take part, with recurrent layers or without.
            state_bytes = max(1, state_bytes)
            wanted = slots_for(config, None if config.kv_pages else free, state_bytes)
            slots = self._ranks.least(wanted, self._device) + self._is_graphed
            free = free_after_slots(config, free, slots * state_bytes)
        fitting = pages_for(config, free, _in_a_page(self._groups, per_token), self._limit, self._groups)
        num_pages = self._ranks.least(fitting, self._device) + self._is_graphed
        return small.with_pages(num_pages, slots, max_drafts(config)), self._is_graphed

    def num_host_pages(self, runner: ModelRunner) -> int:
        """Return the number of host pages of each rank."""
        size = self._ranks.shard.size
        state_bytes = self._shard.state_bytes(self._dtype.itemsize) * size
        bytes_per_token = self._shard.kv_bytes_per_token(runner.kv_dtype.itemsize)
        return host_pages_for(
            self._config, _in_a_page(self._all_groups, bytes_per_token) * size, state_bytes=state_bytes
        )

    def add_graphs(self, runner: ModelRunner) -> None:
        """Record the graphs now, or let the first steps that use them record them."""
        config, capture = self._config, CudaCapture(self._device)
        kinds: list[Graphs] = []
        if self._has_decodes:
            drafts = config.speculation is not None and config.speculation.reads_hidden
            keeps_hidden = drafts and self._ranks.rank == 0
            kinds.append(runner.add_graphs(config.max_running, capture, keeps_hidden=keeps_hidden))
        widths, most = draft_widths(config), piece_tokens(config, self._model)
        kinds.append(runner.add_token_graphs(config.max_running, most, widths, capture))
        if config.cuda_graphs == "start":
            capture_all(kinds, self._device, self._reserved)

    def report_stages(self, runner: ModelRunner) -> None:
        """Measure the stages of a pipeline and log how even they are."""
        if isinstance(runner, StageRunner):
            report_stages(runner, self._whole, self._config, self._ranks)

    def report(self, runner: ModelRunner) -> None:
        """Log the loaded model and its memory."""
        if self._not_graphed is not None:
            logger.info("no CUDA graphs of whole steps: %s", self._not_graphed)
        if self._not_grouped:
            logger.info("one page table for all layers: %s", self._not_grouped)
        logger.info(
            "%s: %.1fM parameters, rank %d of %d, %s on %s, %s attention, %d KV pages of %d tokens (%.0f MiB), "
            "%d in host memory, %d slots for recurrent states",
            self._whole.architecture,
            self._whole.num_parameters / 1e6,
            self._ranks.rank,
            self._ranks.size,
            self._dtype,
            self._device,
            self._backend.name,
            runner.num_pages,
            runner.page_size,
            runner.kv_bytes / 2**20,
            runner.host_memory.num_pages,
            runner.num_state_slots,
        )

    def _decoder(self, load_weights: Callable[..., Decoder]) -> Decoder | NativeDecoder:
        config, size = self._config, self._ranks.shard.size
        # All stages decide alike, because the type of the hidden states depends on it.
        not_native = f"its attention is {self._backend.name}"
        if self._backend.name == "native":
            not_native = unsupported(self._shard, size) or ""
        self._check_quantization(not_native)
        is_fp8 = config.quantization == "fp8"
        is_native = not (not_native or is_fp8)
        if self._device.type == "cuda":
            kv_bytes = self._model.kv_bytes_per_token(self._kv_dtype.itemsize) + self._draft_kv_bytes
            free = torch.cuda.mem_get_info(self._device)[0]
            free -= config.max_running * self._model.state_bytes(self._dtype.itemsize, max_drafts(config))
            itemsize, stage = self._dtype.itemsize, self._ranks.stage
            check_room(config, self._whole, itemsize, kv_bytes, self._limit, free, size, stage)
        decoder = load_weights(
            self._directory,
            self._whole,
            self._dtype,
            self._device,
            input_major=self._device.type == "cpu" and not is_native and prefers_input_major(self._dtype),
            fp8=is_fp8,
            ranks=self._ranks,
            needs_head=tasks_of(config.tasks, self._directory) != ("embed",),
            keeps_blocks=is_native and config.quantization is None,
            uses_mtp=config.speculation is not None and config.speculation.method == "mtp",
        )
        decoder.inner_layers = self._inner_layers
        return NativeDecoder(decoder, self._dtype, config.quantization) if is_native else decoder

    def _check_quantization(self, not_native: str) -> None:
        """Raise ValueError if the weights or the kernels do not support `quantization`.

        `not_native`: why the native kernels cannot run this model; "" if they can.
        """
        quantization = self._config.quantization
        if quantization is not None:
            self._model.check_can_be_rounded(quantization)
        if quantization == "int8" and not_native:
            raise ValueError(
                "quantization 'int8' is for the native kernels, float32 or bfloat16 on a CPU; they cannot run "
                f"this model in {self._dtype} on {self._device}: {not_native}. Leave quantization out"
            )

    def _find_scales(self, decoder: Decoder) -> None:
        """Set the scales of KV in eight bits from a sample computed with unrounded KV."""
        config = self._config
        sample = KVScaleCalibration(
            self._whole.vocab_size, config.page_tokens, min(config.max_step_tokens, self._limit)
        )
        unrounded = self._pages(sample.num_pages, self._dtype)
        self._runner(self._model, decoder, self._ungrouped, unrounded, self._ranks).run(sample.plan)
        sample.set_scales(decoder, unrounded)

    def _pages(self, num_pages: int, dtype: torch.dtype, groups: LayerGroups | None = None) -> KVPages:
        states = StateSlots.of(self._model, 1, 0, self._dtype, self._device)
        num_spare, page_size = int(self._ranks.context_size > 1), self._config.page_size
        return KVPages.of(self._model, num_pages, page_size, dtype, self._device, states, groups, num_spare)


def _in_a_page(groups: LayerGroups | None, bytes_per_token: int) -> int:
    """Return the bytes of a token in the layers of one page, given its bytes in all layers."""
    return bytes_per_token if groups is None else groups.bytes_per_token(bytes_per_token)
