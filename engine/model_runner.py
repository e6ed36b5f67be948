"""Executing steps: the model, its KV pages, the attention backend and the sampler, on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep, choose_backend
from engine.attention.batch import AttentionBatch
from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import FP8, KVPages
from engine.config import EngineConfig
from engine.graphs.decodes import GraphedDecodes, PlacedStep
from engine.graphs.recorded import Capture, CudaCapture, StepGraphs, sizes_up_to
from engine.graphs.rows import Layout
from engine.graphs.setup import capture_all, graph_bytes, why_not
from engine.hub import fingerprint, resolve_model
from engine.kv_memory import available_ram, check_room, host_pages_for, pages_for
from engine.kv_scales import Calibration
from engine.machine import default_threads, usable_cores
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.native_decoder import NativeDecoder, unsupported
from engine.models.weights import load_decoder
from engine.parallel.collective import ALONE, Collective
from engine.parallel.sampler import shared
from engine.plan import Step, StepPlan, StepResult
from engine.prepared_step import Places, PreparedStep
from engine.sampler import sampler_for
from engine.sampling.plain import plain_chooser
from engine.sampling.prompt_logprobs import SLICE_BYTES, score
from engine.stage_clock import StageClock
from engine.swap import HostMemory
from engine.token_reader import TokenReader
from engine.warmup import measure_step

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with KV pages. Steps are prepared by one thread and run by one, which may be another."""

    def __init__(
        self,
        model_config: ModelConfig,
        decoder: Decoder | NativeDecoder,
        attention: AttentionBackend,
        pages: KVPages,
        ranks: Collective = ALONE,
    ) -> None:
        """`decoder` and `pages` are on the same device and this rank's; so is the model's shape. Both are of one
        type, or the pages in float8.
        """
        self.model_config = model_config
        self.device = pages.data.device
        self.kv_dtype = pages.data.dtype
        self.page_size = pages.page_size
        self.num_pages = pages.num_pages
        self.attention_name = attention.name
        self.max_model_len = model_config.max_position_embeddings
        self.fingerprint = ""
        """Of the model's files (`engine.hub.fingerprint`); "" when it was not loaded from files."""
        self._decoder = decoder
        self._attention = attention
        self._pages = pages
        self._ranks = ranks
        self._sampler = shared(sampler_for(model_config.eos_token_ids, self.device), ranks)
        self._host: HostKVPages | None = None
        self.host_memory = HostMemory()
        """The host pages there are; none until `add_host_pages`."""
        self._places = Places(pages.page_size, pages.null_page)
        self._reader = TokenReader(self.device)
        self._sampled: torch.Tensor | None = None  # by the last step; the next one begins with it
        self._sampled_ids: list[int] = []  # the same
        self._decodes: GraphedDecodes | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        kv_bytes_beside: int = 0,
        ranks: Collective = ALONE,
        *,
        load_weights: Callable[..., Decoder] = load_decoder,
    ) -> ModelRunner:
        """Load the model that `config` names and allocate its KV pages. Raises ModelLoadError, ValueError.

        `kv_bytes_beside`: what another model is to keep for each token that the pages hold. With several `ranks`
        each loads its share; they do this together. `load_weights` takes what `load_decoder` does: a benchmark
        draws them.
        """
        size = ranks.shard.size
        torch.set_num_threads(config.threads or default_threads(size))
        device = _device(config.device)
        directory: Path = resolve_model(config.model)
        whole = ModelConfig.from_directory(directory)
        model = ranks.shard.of(whole)
        limit = _max_model_len(config, model)
        dtype, name = _dtype(config, model, device), fingerprint(directory, config.quantization, config.kv_dtype)
        kv_dtype = FP8 if config.kv_dtype == "fp8" else dtype
        windows = frozenset(model.layer_windows)
        heads = AttentionShape(
            model.num_heads, model.num_kv_heads, model.head_dim, config.page_size, windows, kv_dtype
        )
        backend = choose_backend(config.attention, heads, dtype, device)
        reason = unsupported(model, size) if backend.name == "native" else f"its attention is {backend.name}"
        is_native = reason is None and config.quantization != "fp8" and model.weight_format is None
        _check_quantization(config, model, dtype, device, reason)
        if device.type == "cuda":
            kv_bytes = model.kv_bytes_per_token(kv_dtype.itemsize) + kv_bytes_beside
            check_room(config, whole, dtype.itemsize, kv_bytes, limit, torch.cuda.mem_get_info(device)[0], size)
        is_turned, is_fp8 = device.type == "cpu" and not is_native, config.quantization == "fp8"
        loaded_decoder = load_weights(
            directory, whole, dtype, device, input_major=is_turned, fp8=is_fp8, ranks=ranks
        )
        decoder = NativeDecoder(loaded_decoder, config.quantization) if is_native else loaded_decoder

        shape = (model.num_layers, 1, config.page_size, model.num_kv_heads, model.head_dim)
        loaded = cls(model, decoder, backend, KVPages(*shape, kv_dtype, device), ranks)
        loaded.max_model_len, loaded.fingerprint = limit, name
        if kv_dtype == FP8:
            assert isinstance(decoder, Decoder), "the native kernels have no such pages"
            calibration = Calibration(whole.vocab_size, config.page_size, min(config.max_step_tokens, limit))
            unrounded = KVPages(model.num_layers, calibration.num_pages, *shape[2:], dtype, device)
            cls(model, decoder, backend, unrounded, ranks).run(calibration.plan)
            calibration.set_scales(decoder, unrounded)
        if config.kv_pages is not None or device.type == "cpu":
            free = available_ram() // size if config.kv_pages is None else 0
        else:
            free = measure_step(config, limit, loaded.with_pages, device)
        not_graphed = why_not(config, backend, device, size)
        reserved = graph_bytes(config, model, dtype.itemsize, limit) if not_graphed is None else 0
        free = max(0, free - reserved)
        fitting = pages_for(config, free, loaded.kv_bytes_per_token + kv_bytes_beside, limit)
        num_pages = ranks.least(fitting, device)
        runner = loaded.with_pages(num_pages + (not_graphed is None))
        if not_graphed is not None:
            logger.info("no CUDA graphs: %s", not_graphed)
        else:
            graphs = runner.add_graphs(config.max_running, CudaCapture(device))
            if config.cuda_graphs == "start" and not capture_all(graphs, device, reserved):
                runner._decodes = None
        runner.add_host_pages(host_pages_for(config, loaded.kv_bytes_per_token * size))
        logger.info(
            "%s: %.1fM parameters, rank %d of %d, %s on %s, %s attention, %d KV pages of %d tokens (%.0f MiB), "
            "%d in host memory",
            whole.architecture,
            whole.num_parameters / 1e6,
            ranks.shard.rank,
            size,
            dtype,
            device,
            backend.name,
            num_pages,
            config.page_size,
            runner._pages.data.nbytes / 2**20,
            runner.host_memory.num_pages,
        )
        return runner

    def add_host_pages(self, num_pages: int) -> None:
        """Allocate pages in host memory for what preempted requests have computed, and measure the way there."""
        if num_pages:
            self._host = HostKVPages(self._pages, num_pages)
            self.host_memory = HostMemory(num_pages, self._host.measure())

    def add_graphs(self, max_running: int, capture: Capture) -> StepGraphs:
        """Record steps of plain decodes, and replay them. Takes the last page away, which rows that nobody has
        write to: before anything runs.
        """
        self.num_pages -= 1
        sizes, limit = sizes_up_to(max_running), self.max_model_len
        layout = Layout(
            sizes[-1], -(-limit // self.page_size), self.page_size, self.num_pages, self._pages.null_page
        )
        choose = plain_chooser(self.device)
        self._decodes = GraphedDecodes(self._decode, choose, layout, sizes, limit, self.device, capture)
        return self._decodes.graphs

    def with_pages(self, num_pages: int) -> ModelRunner:
        """The same model with other pages, all empty."""
        model = self.model_config
        shape = (model.num_layers, num_pages, self.page_size, model.num_kv_heads, model.head_dim)
        pages = KVPages(*shape, self.kv_dtype, self.device)
        runner = ModelRunner(model, self._decoder, self._attention, pages, self._ranks)
        runner.max_model_len, runner.fingerprint = self.max_model_len, self.fingerprint
        return runner

    @property
    def takes_all_cores(self) -> bool:
        """Whether steps are computed by all of this process's cores."""
        threads = torch.get_num_threads() * self._ranks.shard.size
        return self.device.type == "cpu" and threads >= usable_cores()

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers."""
        return self.model_config.kv_bytes_per_token(self.kv_dtype.itemsize)

    def run(self, plan: StepPlan) -> StepResult:
        """Prepare a step and compute it at once."""
        return self.prepare(plan)()

    def prepare(self, plan: StepPlan) -> Step:
        """Read what the step needs of the scheduler's state. The step that is returned copies pages, computes the
        chunks' KV and samples for each sampling chunk.

        A token id of -1 says that the model computed no valid probabilities for that request (NaN or infinity);
        other requests in the batch are not affected.
        """
        if self._decodes is not None and (placed := self._decodes.place(plan, self._places)) is not None:
            return partial(self._replay, self._decodes, placed)
        return partial(self.compute, self.read(plan, self.device))

    def read(self, plan: StepPlan, device: torch.device) -> PreparedStep:
        """All that a step needs of the scheduler's state, with its tensors on `device`."""
        return PreparedStep.of(plan, self._places, device)

    @torch.inference_mode()
    def compute(self, step: PreparedStep) -> StepResult:
        """Run a step; its tensors are on this runner's device."""
        stages = StageClock(self.device)
        (before, known), self._sampled = (self._sampled, self._sampled_ids), None  # should it fail, that is all
        inputs = self._inputs(step, before)
        if inputs is None:
            return StepResult((), ())
        stages.begin_forward()
        hidden = self._decoder(*inputs, self._pages)
        vocab_size = self.model_config.vocab_size
        scores = score(self._decoder.logits, hidden, step.wanted, vocab_size, SLICE_BYTES)
        if not step.num_rows:
            return StepResult((), (), None, stages.prepare_seconds, prompt_logprobs=scores)
        logits = self._decoder.logits(step.sampling(hidden))
        stages.begin_sampling()
        rows = step.rows([] if before is None else known)
        self._sampled, logprobs = self._sampler.sample(logits, rows)
        self._sampled_ids = sampled = self._reader.begin(self._sampled).wait()
        sample_s = stages.sample_seconds()
        return step.result(sampled, logprobs, stages.prepare_seconds, sample_s, scores)

    @torch.inference_mode()
    def _replay(self, decodes: GraphedDecodes, step: PlacedStep) -> StepResult:
        """Run a step by its graph."""
        stages = StageClock(self.device)
        before, self._sampled = self._sampled, None
        self._copy_pages(step.plan)
        stages.begin_forward()
        sampled, is_replayed = decodes.run(step, before)
        stages.begin_sampling()
        underway = self._reader.begin(sampled)
        self._sampled, self._sampled_ids = sampled, underway.wait()
        tokens, nothing = [self._sampled_ids[row] for row in step.rows], [None] * len(step.rows)
        sample_s = stages.sample_seconds()
        return StepResult(tokens, nothing, None, stages.prepare_seconds, sample_s, is_replayed=is_replayed)

    def _decode(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        step = self._attention.prepare(batch, self._pages.null_page)
        return self._decoder.logits(self._decoder(token_ids, step, self._pages))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """float32 [rows, vocab_size]: what `run` would sample from. For tests and scoring."""
        step = PreparedStep.of(plan, self._places, self.device)
        inputs = self._inputs(step, None)
        assert inputs is not None
        return self._decoder.logits(step.sampling(self._decoder(*inputs, self._pages)))

    def _inputs(
        self, step: PreparedStep, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, AttentionStep] | None:
        """What the decoder takes for all tokens of a step; None when there are none. Copies pages first."""
        self._copy_pages(step)
        if step.batch is None:
            return None
        return step.token_ids(before), self._attention.prepare(step.batch, self._pages.null_page)

    def _copy_pages(self, step: PreparedStep | StepPlan) -> None:
        if self._host is not None:
            self._host.copy_out(step.swap_out)
            self._host.copy_in(step.swap_in)
        self._pages.copy(step.copies)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f'device must be "auto", "cpu" or "cuda", got {name!r}')
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch finds no CUDA device; use "cpu" or a CUDA build of torch')
    return device


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights and KV; "auto" is the checkpoint's on a GPU, float32 on a CPU."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _check_quantization(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, not_native: str | None
) -> None:
    """Raise ValueError for a setting that these weights, or what computes with them, cannot follow.

    `not_native`: why the native kernels cannot run this model, if so.
    """
    if config.quantization is not None and model.weight_format is not None:
        raise ValueError(
            f"quantization is {config.quantization!r}, but the model's weights are quantized already; leave it "
            "out, or take a plain version of the model"
        )
    if config.quantization == "int8" and not_native is not None:
        raise ValueError(
            "quantization 'int8' is for the native kernels, float32 or bfloat16 on a CPU; they cannot run this "
            f"model in {dtype} on {device}: {not_native}. Leave quantization out"
        )


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of prompt and output together."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model was made for {limit} tokens; lower it"
        )
    return config.max_model_len or limit
