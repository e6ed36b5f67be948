"""Assembles an engine from a model, its KV pages, a scheduler and a loop."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cache import KVCacheManager, Namespace, SharedPrefixes
from engine.base.machine import prepare_process
from engine.drafting.base import Drafter
from engine.drafting.ngram import NgramDrafter
from engine.drafting.speculator import Speculator
from engine.grammar.compiled import CompiledGrammar
from engine.grammar.compiler import Compiler
from engine.grammar.constraint import Constraint
from engine.grammar.mask_pace import MaskPace, MaskThreads
from engine.grammar.vocabulary import Vocabulary
from engine.host_tier.host_kv import HostKV
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import LowerTier
from engine.host_tier.peers import NO_PEERS, KVPeers, PageMemory
from engine.model_config.encoder import is_encoder
from engine.model_config.tasks import TASKS, Task, not_served, tasks_of
from engine.program.loop import EngineLoop
from engine.program.precompute import Precomputed, precompute
from engine.runner.device_thread import DeviceThread
from engine.scheduling.scheduler import Scheduler
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import Runner
from engine.values.request import KVSource, Request
from engine.values.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.model_config.layer_groups import LayerGroups
    from engine.ranks.launcher import WorkerLauncher
    from engine.ranks.rank_group import RankGroup
    from engine.ranks.runner import ParallelRunner
    from engine.runner.model_runner import ModelRunner


class ModelFacts(Protocol):
    """Facts about a model that an engine needs besides a way to run it."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which begin at 0."""

    @property
    def max_position_embeddings(self) -> int:
        """The longest context that the model was made for, in tokens."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""


class LoadedRunner(Runner, Protocol):
    """A runner that has loaded its model and allocated its KV pages."""

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model."""

    @property
    def num_pages(self) -> int:
        """KV pages that it allocated."""

    @property
    def num_state_slots(self) -> int:
        """Slots that it allocated for recurrent states; 0 if the model has none."""

    @property
    def layer_groups(self) -> LayerGroups | None:
        """Groups of layers with page tables of their own; None if all layers share one."""

    @property
    def host_memory(self) -> HostMemory:
        """Host pages to which it can copy KV pages."""

    @property
    def lower_tier(self) -> LowerTier:
        """The tier for prefixes for which the host pages have no room."""

    @property
    def is_encoder(self) -> bool:
        """Whether it computes whole prompts and keeps no KV of them."""

    @property
    def page_memory(self) -> PageMemory | None:
        """The bytes of its pages, for other engines; None where they cannot be used."""


class Engine:
    """One replica's engine. Start its `loop`, submit requests made by `new_request`, and listen to the deltas."""

    def __init__(
        self,
        config: EngineConfig,
        runner: LoadedRunner,
        drafter: Drafter | None = None,
        rank_group: RankGroup | None = None,
        device: DeviceThread[Any] | None = None,
    ) -> None:
        """`drafter` is needed if `config.speculation` asks for a draft model or a layer. `rank_group` holds the
        model's other ranks: the loop ends when one of them ends, and they end with this engine. `device` is the
        thread that loaded the model and runs its steps; None leaves the choice to the loop. Raises ValueError.
        """
        if runner.is_encoder:
            config = replace(config, prefix_cache=False, host_kv_gib=0.0, kv_tier=None, preemption="recompute")
        num_stages = getattr(runner, "num_stages", 1)  # only a pipeline has several
        if num_stages != config.pipeline_parallel_size:
            raise ValueError(
                f"engine.pipeline_parallel_size is {config.pipeline_parallel_size}, but the model was loaded in "
                f"{num_stages} stages"
            )
        self.config = config
        self.runner = runner
        self.is_encoder = runner.is_encoder
        """Whether the model generates nothing: its prompts are computed whole, and no KV of them is kept."""
        self.tasks: frozenset[Task] = frozenset(TASKS if config.tasks == "auto" else config.tasks)
        """The tasks that requests may ask for; all of them unless the settings or the model's files say
        otherwise."""
        self.model = runner.model_config
        groups = runner.layer_groups
        self.cache = KVCacheManager(
            runner.num_pages,
            config.page_tokens,
            eviction=config.eviction,
            prefix_cache=config.prefix_cache,
            block_tokens=config.block_tokens,
            num_state_slots=runner.num_state_slots,
            window=None if groups is None else groups.for_cache(config.max_step_tokens),
        )
        self._host = HostKV(
            runner.host_memory,
            config.page_tokens,
            config.preemption,
            config.host_kv_min_uses,
            self.cache.prefix_log,
            config.block_tokens,
            runner.lower_tier,
            self.cache.block_hashes,
            self.cache,
        )
        speculator = _speculator(config.speculation, drafter)
        longest = config.max_model_len or self.model.max_position_embeddings
        self.scheduler = Scheduler(
            self.cache,
            config,
            longest,
            self.model.eos_token_ids,
            self._host,
            speculator,
            whole_prompts=runner.is_encoder,
            num_micro_batches=config.num_micro_batches,
        )
        self.grammars = Compiler(self._vocabulary, config.grammar_cache_bytes)
        self.loop = EngineLoop(
            self.scheduler,
            runner,
            overlap=config.overlap is not False and num_stages == 1,
            stream_interval_s=config.stream_interval_ms / 1000,
            device=device,
        )
        self._mask_threads = MaskThreads(self.loop.wake)
        runner.lower_tier.on_finished(self.loop.wake)
        self._peers: KVPeers = NO_PEERS
        self._rank_group = rank_group
        if rank_group is not None:
            rank_group.watch(self.loop.fail)

    @classmethod
    def from_config(
        cls, config: EngineConfig, runner: LoadedRunner | None = None, launcher: WorkerLauncher | None = None
    ) -> Engine:
        """Load the models that `config` names, unless `runner` is given. Raises ModelLoadError, ValueError.

        `launcher` starts the ranks if `config` asks for several; None starts them as processes of this machine.
        """
        if runner is not None:
            return cls(config, runner)
        prepare_process(config.cpus)
        config = replace(config, tasks=list(tasks_of(config.tasks, model_directory(config))))
        from engine.runner.model_runner import ModelRunner  # imports torch, which a given runner does not need

        if is_encoder(model_directory(config)):
            from engine.loading.load_encoder import load_encoder

            encoder = load_encoder(config)
            overlap = not encoder.takes_all_cores if config.overlap is None else config.overlap
            return cls(replace(config, overlap=overlap), encoder)
        device, load = thread_of_gpu(config), partial(_load, config, launcher)
        loaded, drafter = load() if device is None else device.launch(load).wait()
        if config.overlap is None:
            config = replace(config, overlap=not loaded.takes_all_cores)
        rank_group = None if isinstance(loaded, ModelRunner) else loaded.rank_group
        return cls(config, loaded, drafter, rank_group, device)

    def connect_peers(self, peers: KVPeers) -> None:
        """Fetch KV of requests from their sources through `peers`, given a prefix cache and memory for it.

        Call it before the loop starts; `peers` are closed with this engine.
        """
        if self.loop.has_started:
            raise RuntimeError("the loop is running; call connect_peers before start")
        self._peers = peers
        if self.config.prefix_cache and self.runner.page_memory is not None:
            self._host.connect(peers)
            peers.on_finished(self.loop.wake)

    def close(self) -> None:
        """Stop the loop and end the model's other ranks. Idempotent."""
        self.loop.stop()
        self._mask_threads.close()
        self.runner.lower_tier.close()
        self._peers.close()
        if self._rank_group is not None:
            self._rank_group.close()

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together, with this model and these pages."""
        return self.scheduler.max_model_len

    def new_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        salt: str = "",
        output_ids: Sequence[int] = (),
        num_prompt_reported: int = 0,
        priority: int = 0,
        is_deferrable: bool = False,
        tenant: str = "",
        compiled: CompiledGrammar | None = None,
        source: KVSource | None = None,
    ) -> Request:
        """Make a request for this engine, arriving now.

        Another engine may already have generated `output_ids` and scored `num_prompt_reported` prompt tokens.
        `compiled` is its grammar, if it was compiled beforehand; otherwise it is compiled here, which may take
        long. KV of its beginning is fetched from `source` where that is faster than computing it. Raises
        ValueError if a token id is not in the vocabulary or if an encoder should generate, and InvalidGrammar,
        which is a ValueError.
        """
        if self.is_encoder and sampling.pooling is None:
            raise ValueError(not_served("generate", self.tasks, is_encoder=True))
        pooled = () if sampling.pooling is None else sampling.pooling.token_ids
        for name, ids in (("prompt", prompt_ids), ("output", output_ids), ("pooling", pooled)):
            if ids and not _are_below(self.model.vocab_size, ids):
                outside = next(token for token in ids if not 0 <= token < self.model.vocab_size)
                raise ValueError(
                    f"token id {outside} in the {name} is not in the vocabulary of {self.model.vocab_size} tokens"
                )
        request = Request.make(
            request_id,
            prompt_ids,
            sampling,
            arrival=self.loop.clock(),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            namespace=Namespace(self.config.name, salt=salt),
            output_ids=output_ids,
            priority=priority,
            is_deferrable=is_deferrable,
            tenant=tenant,
            num_prompt_reported=num_prompt_reported,
            source=source,
        )
        if sampling.grammar is not None:
            # Advancing a grammar over all tokens that another engine generated may take long.
            pace = MaskPace(self._mask_threads, self.config.grammar_mask_budget_s, is_slow=bool(output_ids))
            request.constraint = Constraint(compiled or self.grammars.compile(sampling.grammar), pace)
        return request

    def share_prefixes(self, prefixes: Sequence[Sequence[int]], max_kv_share: float = 0.5) -> Precomputed:
        """Compute prefixes that requests with any salt can reuse, and keep them for good, before the loop starts.

        `max_kv_share` is the largest share of the KV pages that they may take. Raises ValueError when they need
        more, or when one cannot be computed or found.
        """
        if prefixes and not self.config.prefix_cache:
            raise ValueError(
                "prefixes cannot be shared without a prefix cache: set engine.prefix_cache to true, or share none"
            )
        sampling, done = SamplingParams(max_tokens=1, temperature=0.0, seed=0), Precomputed()
        unit = SharedPrefixes(self.config.page_tokens, self.config.block_tokens).unit
        for number, whole in enumerate(prefixes):
            # The cache keeps a state or tail at the end of the computed tokens. The shared tokens must end at
            # the same position.
            token_ids = whole if self.cache.resume_points is None else whole[: len(whole) - len(whole) % unit]
            if not token_ids:
                continue
            request = self.new_request(f"shared-{number}", token_ids, sampling)
            computed = precompute(self.loop, [request], math.inf)
            if not computed.num_prompts:
                raise ValueError(
                    f"the shared prefix {number} has {len(token_ids)} tokens, but at most "
                    f"{self.max_model_len - 1} fit: make it shorter, or the context or the KV memory larger"
                )
            self.scheduler.share(request.namespace, token_ids)
            done += computed
            share = self.cache.num_shared_pages / self.cache.num_pages
            if share > max_kv_share:
                raise ValueError(
                    f"the shared prefixes up to number {number} take {share:.0%} of the KV pages, but at most "
                    f"{max_kv_share:.0%} may be taken: share less, or give the engine more pages"
                )
        return done

    def _vocabulary(self) -> Vocabulary:
        from engine.text.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model_directory(self.config))
        return Vocabulary.of(tokenizer, self.model.vocab_size, self.model.eos_token_ids)


def _are_below(size: int, ids: Sequence[int]) -> bool:
    """Whether all of `ids`, at least one, are from 0 to `size` - 1. An array, as from the wire, is not copied."""
    if isinstance(ids, array):
        numbers = np.asarray(ids)
        return bool(numbers.min() >= 0 and numbers.max() < size)
    return 0 <= min(ids) <= max(ids) < size


def _speculator(settings: Speculation | None, drafter: Drafter | None) -> Speculator | None:
    if settings is None:
        return None
    if settings.method == "ngram":
        drafter = NgramDrafter(settings.min_match, settings.max_match, settings.window)
    if drafter is None:
        raise ValueError(f"speculation.method is {settings.method!r}, but no drafter was loaded with the runner")
    return Speculator(drafter, settings.max_drafts, adaptive=settings.adaptive)


def model_directory(config: EngineConfig) -> Path:
    """Return the directory of the model that `config` names. Raises ModelLoadError if there is none."""
    from engine.model_files.model_directory import resolve_model

    return resolve_model(config.model, config.model_revision)


def thread_of_gpu(config: EngineConfig) -> DeviceThread[Any] | None:
    """Return a thread that loads the model and then runs its steps, if that is on a GPU; else None.

    cuDNN's plans and cuBLAS's handles belong to the thread that made them: a warm-up in another one would leave
    all of them to the first requests.
    """
    from engine.loading.devices import device_named

    is_on_gpu = device_named(config.device).type == "cuda"
    return DeviceThread() if is_on_gpu and config.pipeline_parallel_size == 1 else None


def _load(
    config: EngineConfig, launcher: WorkerLauncher | None
) -> tuple[ModelRunner | ParallelRunner, Drafter | None]:
    """Load the model, and what drafts for it if that is not its text."""
    from engine.ranks import load_runner

    if config.speculation is None or config.speculation.method == "ngram":
        return load_runner.load_runner(config, launcher=launcher), None
    if config.speculation.reads_hidden:
        from engine.program.load_with_layer import load_with_layer

        return load_with_layer(config, launcher)
    from engine.program.load_with_draft import load_with_draft_model

    return load_with_draft_model(config, launcher)
