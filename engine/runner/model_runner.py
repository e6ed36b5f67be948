"""Executes steps on one device, with the model, its KV pages, the attention backend and the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Self

import torch

from engine.attention.base import AttentionBackend, AttentionStep
from engine.attention.batch import AttentionBatch
from engine.attention.copy_streams import fence
from engine.attention.host_pages import HostKVPages
from engine.attention.kv_pages import KVPages
from engine.attention.page_memory import BytesOfPages
from engine.attention.part_reader import PartReader
from engine.attention.pinned import to_device
from engine.attention.places import Places
from engine.attention.state_slots import StateSlots
from engine.base.machine import usable_cores
from engine.graphs.chain_graphs import ChainGraphs, ChainSize
from engine.graphs.decode_graphs import DecodeGraphs, GraphStep
from engine.graphs.draft_graphs import DraftGraphs, DraftSize, draft_sizes
from engine.graphs.piece_graphs import PieceGraphs
from engine.graphs.row_assignment import RowLayout
from engine.graphs.spread_graphs import LONGEST, SpreadGraphs, spread_sizes
from engine.graphs.state_inputs import MOST_WIDTH, StateInputs
from engine.graphs.step_graphs import Capture, CutCapture, DecodeSizes, contexts_up_to, sizes_up_to
from engine.graphs.token_graphs import TokenGraphs
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import LowerTier, NoLowerTier
from engine.kv_tier.open_tier import open_tier, rank_files
from engine.kv_tier.rank_pages import Moved, RankPages
from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import LayerGroups
from engine.models.decoder import Decoder
from engine.models.expert_copies import Changes, ExpertCopies
from engine.models.expert_load import ExpertLoad
from engine.models.native_decoder import NativeDecoder
from engine.parallel.collective import ALONE, Collective
from engine.parallel.sampler import shared
from engine.runner.launched_step import LaunchedStep
from engine.runner.next_drafts import NextDrafts
from engine.runner.prepared_step import PreparedStep
from engine.runner.stage_clock import StageClock
from engine.runner.token_reader import TokenReader, TokensUnderway
from engine.sampling.graph_chooser import graph_chooser_for
from engine.sampling.masks import GrammarMasks
from engine.sampling.pooled import pool
from engine.sampling.prompt_logprobs import SLICE_BYTES, score
from engine.sampling.sampler import sampler_for
from engine.settings.kv_tier import KVTier
from engine.values.logprobs import TokenLogprobs
from engine.values.plan import Chunk, Step, StepPlan, StepResult, StepUnderway, result_of


class ModelRunner:
    """A loaded model with KV pages. One thread prepares steps, and one, which may be another, runs them."""

    is_encoder = False

    def __init__(
        self,
        model_config: ModelConfig,
        decoder: Decoder | NativeDecoder,
        attention: AttentionBackend,
        pages: KVPages,
        ranks: Collective = ALONE,
        groups: LayerGroups | None = None,
    ) -> None:
        """`decoder` and `pages` are this rank's, on one device; the model's shape is this rank's too. Both have
        one type, or the pages have float8. `groups` are those of the pages, if layers have their own page tables.
        """
        self.model_config = model_config
        self.device = pages.data.device
        self.kv_dtype = pages.data.dtype
        self.page_size = pages.page_size * ranks.context_size
        """Tokens of a page, of which each rank that divides KV with others has a part."""
        self.num_pages = pages.num_pages
        states = pages.states
        self.num_state_slots = 0 if states is None else states.num_slots
        """Slots for the states of recurrent layers; 0 in a model without any."""
        self.layer_groups = groups
        """Groups of layers with page tables of their own; None if all layers share one."""
        self.attention_name = attention.name
        self.max_model_len = model_config.max_position_embeddings
        self.fingerprint = ""
        """Fingerprint of the model's files (`engine.model_files.model_directory`); "" if it has none."""
        self.decoder, self.attention, self.pages = decoder, attention, pages
        self._ranks = ranks
        self._sampler = shared(sampler_for(model_config.eos_token_ids, self.device), ranks)
        self._host: HostKVPages | None = None
        self.host_memory = HostMemory()
        """The host pages; none until `add_host_pages`."""
        self.part_bytes: list[int] = []
        """Bytes of each rank's part of a page, with host pages."""
        self.lower_tier: LowerTier = NoLowerTier()
        """The tier for prefixes for which the host pages have no room; none until `add_lower_tier`."""
        null_slot = None if states is None else states.null_slot
        self._places = Places(self.page_size, pages.null_page, null_slot, pages.num_groups)
        self._reader = TokenReader(self.device)
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=self.device)
        self._sampled: torch.Tensor | None = None  # sampled by the last step; the next one may begin with these
        self._underway = TokensUnderway(self._no_tokens, None)  # the same tokens for the host
        self._empty_page: int | None = None  # page for the unused rows and tokens of graphs
        self._decodes: DecodeGraphs | None = None
        self._others: TokenGraphs | None = None
        self.on_hidden: Callable[[Sequence[Chunk], torch.Tensor], None] | None = None
        """Called with the chunks of each step and the hidden states of their tokens, [N, hidden_width], which the
        next step overwrites."""
        self.drafts_after: Callable[[StepPlan], NextDrafts | None] = lambda _: None
        """Called with each plan when it is prepared; returns the drafts to compute behind the step."""
        self._next_drafts: NextDrafts | None = None  # those behind the last prepared step
        self._of_rows: torch.Tensor | None = None  # the hidden states of the decodes that a graph replays

    def add_host_pages(self, num_pages: int) -> None:
        """Allocate host pages for the KV of preempted requests, and measure how long copying takes."""
        if num_pages:
            self._host = HostKVPages(self.pages, num_pages)
            host = self._host
            state_pages = max(self._ranks.all_of(host.state_pages, self.device))
            self.host_memory = HostMemory(num_pages, host.measure(), host.page_bytes, state_pages)
            self.part_bytes = self._ranks.all_of(host.page_bytes, self.device)

    def add_lower_tier(self, settings: KVTier) -> None:
        """Keep prefixes in files too. Needs host pages. Raises ValueError when the directory cannot be used."""
        assert self._host is not None
        self.lower_tier = open_tier(settings, self._host, self._layout, self.part_bytes)

    def rank_pages(self, settings: KVTier, report: Callable[[Moved], None]) -> RankPages:
        """Return the mover of a later rank's parts of pages; it calls `report`."""
        assert self._host is not None
        files = rank_files(settings, self._host, self._layout, self._ranks.rank, self._ranks.size)
        return RankPages(files, self._host.page, report, self._fence)

    @property
    def _layout(self) -> str:
        """The model's fingerprint, and the stages and parts that its pages are divided into."""
        size = self._ranks.context_size
        parts = "" if size == 1 else f"-context-{size}"
        return self.fingerprint + self._ranks.stage.suffix + parts

    @property
    def page_memory(self) -> BytesOfPages | None:
        """The bytes of this rank's pages, for other engines; None without host pages."""
        if self._host is None or self.pages.states is not None or self.layer_groups is not None:
            return None  # KV without its resume point would be of no use there.
        return BytesOfPages(self.pages, self._host, self._layout)

    def part_reader(self, report: Callable[[int, bytes | memoryview], None]) -> PartReader | None:
        """Return the reader of a later rank's parts of pages, which calls `report`; None without `page_memory`."""
        memory = self.page_memory
        return None if memory is None else PartReader(memory, report, self._fence)

    def add_graphs(self, max_running: int, capture: Capture, *, keeps_hidden: bool = False) -> DecodeGraphs:
        """Make graphs that replay steps of decodes. Call it before any step, because it reserves the last page and
        the last slot for a state, to which unused rows write. `keeps_hidden`: whether `on_hidden` will be set.
        """
        contexts = contexts_up_to(self.max_model_len, is_planned=self.attention.plans_by_bounds)
        sizes = DecodeSizes(sizes_up_to(max_running), contexts)
        layout = self._row_layout(sizes.rows[-1])
        if keeps_hidden:
            shape = layout.max_rows, self.hidden_width
            self._of_rows = torch.zeros(shape, dtype=self._decoder_type, device=self.device)
        choose = graph_chooser_for(self.device)
        self._decodes = DecodeGraphs(
            self._decode,
            choose,
            self._sampler.sample,
            layout,
            sizes,
            self.model_config.vocab_size,
            self.device,
            capture,
            # The masks would have to be sent to the other ranks, which do not know the requests.
            GrammarMasks(self.model_config.eos_token_ids) if self._ranks.shard.size == 1 else None,
            has_states=self.pages.states is not None,
        )
        return self._decodes

    def add_token_graphs(
        self, max_running: int, max_tokens: int, widths: Sequence[int], capture: CutCapture
    ) -> TokenGraphs:
        """Make graphs that replay other steps of up to `max_tokens` tokens: as a whole if these are few and the
        attention backend supports it, else in pieces; and as a whole steps in which no row has more tokens than
        one of `widths`. 0, or no widths: no graphs of that kind. Call it before any step, like `add_graphs`.
        """
        config, empty_slot = self.model_config, self._reserve() * self.page_size
        sizes = self._sizes_of_rows(widths, max_running)
        most = max([max_tokens, *(size.num_tokens for size in sizes)])
        hidden = torch.zeros(most, self.hidden_width, dtype=self._decoder_type, device=self.device)
        drafts, spreads, pieces, num_groups = None, None, None, self.pages.num_groups
        room = self.max_model_len, self.page_size
        if sizes:
            states = None
            if self.pages.states is not None:
                states = StateInputs(max(size.rows for size in sizes), self.num_state_slots, self.device)
            drafts = DraftGraphs(self._layers, sizes, *room, empty_slot, hidden, capture, num_groups, states)
        if self.spreads_prompts and spread_sizes(max_tokens):
            spreads = SpreadGraphs(self._layers, max_tokens, *room, empty_slot, hidden, capture)
        above = 0 if spreads is None else LONGEST
        if max_tokens > above:
            decoder, latent = partial(self.decoder, pages=self.pages), config.attention.latent
            of_model = latent, empty_slot, hidden, capture, num_groups, above
            pieces = PieceGraphs(decoder, max_tokens, *of_model, has_chunks=config.chunk is not None)
        self._others = TokenGraphs(drafts, spreads, pieces)
        return self._others

    def chain_graphs(self, sizes: Sequence[ChainSize], capture: Capture) -> ChainGraphs:
        """Make graphs with which a drafter continues this model's drafts. Call it before any step, like
        `add_graphs`.
        """
        layout = self._row_layout(sizes[-1].rows)
        carried = torch.zeros(layout.max_rows, self.carried_size, dtype=self._decoder_type, device=self.device)
        choose = graph_chooser_for(self.device)
        return ChainGraphs(self._draft_call, sizes, layout, self.max_model_len, choose, carried, capture)

    def _row_layout(self, max_rows: int) -> RowLayout:
        """Return the layout of rows on the device, with the last page and the last slot for unused rows."""
        empty_page, pages = self._reserve(), self.pages
        max_pages = -(-self.max_model_len // self.page_size)
        of_pages = self.page_size, empty_page, pages.null_page, pages.num_groups
        return RowLayout(max_rows, max_pages, *of_pages, self.num_state_slots)

    @property
    def carried_size(self) -> int:
        """Numbers that a call carries over to the next when this model drafts, in addition to the token."""
        return 0

    def _draft_call(
        self, token_ids: torch.Tensor, batch: AttentionBatch, carried: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement `DraftCall`."""
        return self.decoder.logits(self._layers(token_ids, batch)), carried

    def draft_call_behind(
        self, token_ids: torch.Tensor, batch: AttentionBatch, before: torch.Tensor | None, last: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute tokens that a step of another model has sampled. Returns the logits after those at the indices
        `last`, float32 [R, V], and what this call carries over; before: [N, hidden_size], the states before the
        tokens, which only layers read.
        """
        hidden, _ = self._hidden(token_ids, batch)
        return self.decoder.logits(hidden.index_select(0, last)), None

    @property
    def hidden_width(self) -> int:
        """Numbers of a token's hidden states (`Decoder.inner_layers`)."""
        return self.model_config.hidden_size * (1 + len(self.decoder.inner_layers))

    @property
    def _decoder_type(self) -> torch.dtype:
        assert isinstance(self.decoder, Decoder), "graphs are for GPUs"
        return self.decoder.embed.weight.dtype

    def _sizes_of_rows(self, widths: Sequence[int], max_running: int) -> list[DraftSize]:
        """Return the sizes of graphs for rows with few tokens."""
        return draft_sizes(self._recorded(widths), max_running)

    def _recorded(self, widths: Sequence[int]) -> list[int]:
        """Return those of some widths of rows, above one, for which graphs can be made."""
        most = MOST_WIDTH if self.pages.states is not None else max([0, *widths])
        return [width for width in widths if width <= most] if self.attention.captures_prompts else []

    @property
    def spreads_prompts(self) -> bool:
        """Whether a step with few tokens of a prompt may have a row for each of them, which no state allows."""
        return self.attention.spreads_prompts and self.pages.states is None

    def _reserve(self) -> int:
        """Reserve and return the page to which unused rows and tokens of graphs write."""
        if self._empty_page is None:
            self.num_pages -= 1
            self.num_state_slots = max(0, self.num_state_slots - 1)
            self._empty_page = self.num_pages
            if self.expert_load is not None:
                self.expert_load.padding_from = self._empty_page * self.page_size
        return self._empty_page

    def with_pages(self, num_pages: int, num_slots: int = 1, max_drafts: int = 0) -> Self:
        """Return a runner with the same model and other pages and slots for states, all empty. Each slot has room
        for `max_drafts` draft tokens.
        """
        model = self.model_config
        before = self.pages.states
        dtype = self.kv_dtype if before is None else before.dtype
        states = StateSlots.of(model, num_slots, max_drafts, dtype, self.device)
        groups = self.layer_groups
        size, spare = self.pages.page_size, self.pages.num_spare
        pages = KVPages.of(model, num_pages, size, self.kv_dtype, self.device, states, groups, spare)
        runner = type(self)(model, self.decoder, self.attention, pages, self._ranks, groups)
        runner.max_model_len, runner.fingerprint = self.max_model_len, self.fingerprint
        return runner

    @property
    def expert_load(self) -> ExpertLoad | None:
        """The tokens of each expert; None if they are not counted."""
        return self.decoder.expert_load if isinstance(self.decoder, Decoder) else None

    @property
    def expert_copies(self) -> ExpertCopies | None:
        """This rank's copies of other ranks' experts; None if there is no room for any."""
        return self.decoder.expert_copies if isinstance(self.decoder, Decoder) else None

    @torch.inference_mode()
    def place_copies(self, changes: Changes) -> None:
        """Change the copies of experts in some layers, after the steps launched so far; on all ranks together."""
        assert self.expert_copies is not None
        self.expert_copies.place(changes)

    @property
    def takes_all_cores(self) -> bool:
        """Whether steps use all of this process's cores."""
        threads = torch.get_num_threads() * self._ranks.size
        return self.device.type == "cpu" and threads >= usable_cores()

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pages.data.nbytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token, in all layers."""
        return self.model_config.kv_bytes_per_token(self.kv_dtype.itemsize)

    def run(self, plan: StepPlan) -> StepResult:
        """Prepare a step and compute it immediately."""
        return result_of(self.prepare(plan)())

    def prepare(self, plan: StepPlan) -> Step:
        """Read all that the step needs of the scheduler's state. The returned step copies pages, computes the
        chunks' KV and samples for each sampling chunk.

        A token id of -1 means that the model computed no valid probabilities for that request (NaN or infinity);
        other requests in the batch are not affected.
        """
        behind_last, self._next_drafts = self._next_drafts, None
        self._next_drafts = self.drafts_after(plan)
        if (placed := self.place(plan)) is not None:
            return partial(self.replay, placed)
        step = PreparedStep.of(plan, self._places, behind_last, self._next_drafts)
        return partial(self.compute, to_device(step, self.device))

    def place(self, plan: StepPlan) -> GraphStep | None:
        """Read all that a step for graphs needs of the scheduler's state; None if graphs cannot run it."""
        return None if self._decodes is None else self._decodes.place(plan, self._places)

    def read(self, plan: StepPlan, device: torch.device) -> PreparedStep:
        """Read all that a step needs of the scheduler's state, with its tensors on `device`."""
        return to_device(PreparedStep.of(plan, self._places), device)

    def compute(self, step: PreparedStep) -> StepResult | StepUnderway:
        """Run a step whose tensors are on this runner's device. A GPU is not waited for."""
        with torch.inference_mode():  # A decorator would create a new context for each call.
            found = self._launch(step)
            return found if self._is_behind else result_of(found)

    @property
    def _is_behind(self) -> bool:
        """Whether steps return before they are computed: on GPUs, and with graphs, which CPUs can record, too."""
        return self.device.type == "cuda" or self._decodes is not None

    def _launch(self, step: PreparedStep) -> StepResult | LaunchedStep:
        stages = StageClock(self.device)
        before, self._sampled = self._sampled, None  # Drop it even if the step fails.
        self._copy_pages(step)
        finish = self._copied(step)
        if step.batch is None:
            stages.wait()
            finish()
            return StepResult((), ())
        stages.begin_forward()
        hidden, is_replayed = self._hidden(step.token_ids(before), step.batch)
        if self.on_hidden is not None:
            self.on_hidden(step.computed, hidden)
        return self._sample(step, hidden, before, stages, finish, is_replayed=is_replayed)

    def _sample(
        self,
        step: PreparedStep,
        hidden: torch.Tensor,
        before: torch.Tensor | None,
        stages: StageClock,
        finish: Callable[[], None] = lambda: None,
        *,
        is_replayed: bool,
    ) -> LaunchedStep:
        """Launch what follows the hidden states of a step's tokens, [N, hidden_width]. Waits only for values that
        the host needs: of tokens before, and of log-probabilities and pooled tokens.
        """
        vocab_size = self.model_config.vocab_size
        scores = score(self.decoder.logits, hidden, step.wanted, vocab_size, SLICE_BYTES)
        pooled = pool(self.decoder, hidden, step.pooled) if step.pooled else {}
        sampled, logprobs = self._no_tokens, list[TokenLogprobs | None]()
        if step.num_rows:
            logits = self.decoder.logits(step.sampling(hidden))
            stages.begin_sampling()
            sampled, logprobs = self._sampler.sample(logits, step.rows(self._known(before)))
            stages.end_sampling()
            self._sampled = sampled
        # Without tokens, too, the result comes after the step's work: other threads then read its pages.
        self._underway = self._reader.begin(sampled)
        if step.next_drafts is not None:
            step.next_drafts.launch(step.ids, sampled)
        result = partial(step.result, logprobs=logprobs, scores=scores, pooled=pooled, is_replayed=is_replayed)
        return LaunchedStep(self._underway, stages, result, finish)

    @torch.inference_mode()
    def replay(self, step: GraphStep) -> LaunchedStep:
        """Launch a step by replaying its graph."""
        decodes = self._decodes
        assert decodes is not None
        stages = StageClock(self.device)
        before, self._sampled = self._sampled, None
        self._copy_pages(step)
        finish = self._copied(step)
        stages.begin_forward()
        is_replayed = decodes.forward(step, before)
        if self.on_hidden is not None:
            assert self._of_rows is not None, "the graphs were made with keeps_hidden"
            in_order = sorted(zip(step.rows, step.chunks, strict=True), key=itemgetter(0))
            self.on_hidden([chunk for _, chunk in in_order], self._of_rows[: len(in_order)])
        stages.begin_sampling()
        sampled, logprobs = decodes.sample(step, self._known(before))
        stages.end_sampling()
        self._sampled, self._underway = sampled, self._reader.begin(sampled)
        result = partial(step.result, logprobs=logprobs, is_replayed=is_replayed)
        return LaunchedStep(self._underway, stages, result, finish)

    def _known(self, before: torch.Tensor | None) -> Callable[[], Sequence[int]]:
        """Return a function that waits for the tokens that the previous step sampled, if it did, and returns
        them.
        """
        return list if before is None else self._underway.wait

    def _decode(self, token_ids: torch.Tensor, batch: AttentionBatch, logits: torch.Tensor) -> None:
        assert isinstance(self.decoder, Decoder), "graphs are for GPUs"
        hidden = self._layers(token_ids, batch)
        if self._of_rows is not None:
            self._of_rows[: len(hidden)] = hidden
        self.decoder.logits(hidden, logits)

    def _hidden(self, token_ids: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, bool]:
        """Return the hidden states of a step's tokens, and whether graphs were replayed for them."""
        found = self._replayed(token_ids, batch)
        return (self._layers(token_ids, batch), False) if found is None else found

    def _replayed(self, token_ids: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, bool] | None:
        return None if self._others is None else self._others.hidden(token_ids, batch, self._prepare)

    def _layers(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        hidden: torch.Tensor = self.decoder(token_ids, self._prepare(batch), self.pages)
        return hidden

    def _prepare(self, batch: AttentionBatch) -> AttentionStep:
        return self.attention.prepare(batch, self.pages.null_page)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Return float32 [rows, vocab_size]: the logits that `run` would sample from. For tests and scoring."""
        step = self.read(plan, self.device)
        assert step.batch is not None
        self._copy_pages(step)
        hidden, _ = self._hidden(step.token_ids(None), step.batch)
        return self.decoder.logits(step.sampling(hidden))

    def _copy_pages(self, step: PreparedStep | GraphStep) -> None:
        if self._host is not None:
            self._host.copy_out(step.swap_out)
            if isinstance(step, PreparedStep):  # Graphs run no models with states.
                self._host.copy_states_out(step.states_out)
                self._host.copy_states_in(step.states_in)
            self._host.copy_in(step.swap_in)
        self.pages.copy(step.copies)

    def _copied(self, step: PreparedStep | GraphStep) -> Callable[[], None]:
        """Return a function that waits for a step's copies to the host, which other threads read later."""
        return self._host.fence() if self._host is not None and step.swap_out else lambda: None

    def _fence(self) -> Callable[[], None]:
        """Return a function that waits for all work that this thread has launched on the device."""
        assert self._host is not None
        waits = fence(self.device), self._host.fence()

        def wait() -> None:
            for done in waits:
                done()

        return wait
