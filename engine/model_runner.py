"""Executing steps: the model, its KV pages, the attention backend and the sampler, on one device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep, choose_backend
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages
from engine.config import EngineConfig
from engine.hub import fingerprint, resolve_model
from engine.kv_memory import available_ram, pages_for
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, Rotation
from engine.models.weights import load_decoder
from engine.plan import Chunk, StepPlan, StepResult
from engine.sampler import Sampler
from engine.stage_clock import StageClock
from engine.warmup import measure_step

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model with KV pages. `run` is called by one thread at a time."""

    def __init__(
        self, model_config: ModelConfig, decoder: Decoder, attention: AttentionBackend, pages: KVPages
    ) -> None:
        """`decoder` and `pages` are on the same device and of the same type."""
        self.model_config = model_config
        self.device = pages.data.device
        self.dtype = pages.data.dtype
        self.page_size = pages.page_size
        self.num_pages = pages.num_pages
        self.attention_name = attention.name
        self.max_model_len = model_config.max_position_embeddings
        self.fingerprint = ""
        """Of the model's files (`engine.hub.fingerprint`); "" when it was not loaded from files."""
        self._decoder = decoder
        self._attention = attention
        self._pages = pages
        self._sampler = Sampler(model_config.eos_token_ids)
        rope = model_config.rope
        self._inv_freq = torch.tensor(
            rope.inverse_frequencies(model_config.head_dim), dtype=torch.float32, device=self.device
        )

    @classmethod
    def load(cls, config: EngineConfig) -> ModelRunner:
        """Load the model that `config` names and allocate its KV pages. Raises ModelLoadError, ValueError."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = _device(config.device)
        directory: Path = resolve_model(config.model)
        model = ModelConfig.from_directory(directory)
        limit = _max_model_len(config, model)
        backend = choose_backend(config.attention, device)(
            AttentionShape(
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                config.page_size,
                frozenset(model.layer_windows),
            )
        )
        dtype, name = _dtype(config, model, device), fingerprint(directory)
        decoder = load_decoder(directory, model, dtype, device)

        def with_pages(num_pages: int) -> ModelRunner:
            shape = (model.num_layers, num_pages, config.page_size, model.num_kv_heads, model.head_dim)
            runner = cls(model, decoder, backend, KVPages(*shape, dtype, device))
            runner.max_model_len = limit
            runner.fingerprint = name
            return runner

        if config.kv_pages is not None or device.type == "cpu":
            free = available_ram() if config.kv_pages is None else 0
        else:
            free = measure_step(config, limit, with_pages, device)
        num_pages = pages_for(config, free, model.kv_bytes_per_token(dtype.itemsize), limit)
        runner = with_pages(num_pages)
        logger.info(
            "%s: %.1fM parameters, %s on %s, %s attention, %d KV pages of %d tokens (%.0f MiB)",
            model.architecture,
            model.num_parameters / 1e6,
            dtype,
            device,
            backend.name,
            num_pages,
            config.page_size,
            runner._pages.data.nbytes / 2**20,
        )
        return runner

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Copy pages, compute the chunks' KV and sample a token for each sampling chunk.

        A token id of -1 says that the model computed no valid probabilities for that request (NaN or infinity);
        other requests in the batch are not affected.
        """
        stages = StageClock(self.device)
        self._pages.copy(plan.copies)
        if not plan.chunks:
            return StepResult((), ())
        inputs = self._prepare(plan.chunks)
        stages.begin_forward()
        hidden = self._decoder(*inputs, self._pages)
        sampling = plan.sampling_chunks
        if not sampling:
            return StepResult((), (), stages.prepare_seconds)
        logits = self._decoder.logits(hidden[self._last_tokens(plan.chunks)])
        stages.begin_sampling()
        token_ids, logprobs = self._sampler.sample(logits, [chunk.request for chunk in sampling])
        return StepResult(token_ids, logprobs, stages.prepare_seconds, stages.sample_seconds())

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """float32 [sampling chunks, vocab_size]: what `run` would sample from. For tests and scoring."""
        self._pages.copy(plan.copies)
        hidden = self._decoder(*self._prepare(plan.chunks), self._pages)
        return self._decoder.logits(hidden[self._last_tokens(plan.chunks)])

    def _prepare(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, Rotation, AttentionStep]:
        """What the decoder takes for all tokens of a step, on its device."""
        batch = AttentionBatch.from_chunks(chunks, self.page_size, self._pages.null_page, self.device)
        step = self._attention.prepare(batch, self._pages.null_page)
        ids = chain.from_iterable(chunk.token_ids for chunk in chunks)
        token_ids = torch.from_numpy(np.fromiter(ids, dtype=np.int64)).to(self.device, non_blocking=True)
        rotation = Rotation(batch.positions, self._inv_freq, self.model_config.rope.attention_factor, self.dtype)
        return token_ids, rotation, step

    def _last_tokens(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """int64: index in the step of each sampling chunk's last token."""
        ends = np.cumsum([chunk.num_tokens for chunk in chunks])
        sampled = ends[[chunk.samples for chunk in chunks]] - 1
        return torch.from_numpy(sampled).to(self.device, non_blocking=True)


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


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Most tokens of prompt and output together."""
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, the model was made for {limit} tokens; lower it"
        )
    return config.max_model_len or limit
