"""Steps with draft tokens and short prompts, replayed: whole, or in pieces with attention between them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cache import StateStep
from engine.attention.batch import AttentionBatch
from engine.attention.reference import ReferenceAttention
from engine.graphs.draft_graphs import DraftGraphs, DraftSize, draft_sizes
from engine.graphs.piece_graphs import piece_sizes
from engine.graphs.spread_graphs import spread_sizes
from engine.graphs.step_graphs import CudaCapture
from engine.loading.load_model import load_model
from engine.program import load_with_draft as loading
from engine.program.engine import Engine
from engine.runner.draft_model import DraftModel
from engine.scheduling.stats import StepStats
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from tests.engine.support.gpu_proofs import counted_replays
from tests.engine.support.graph_workloads import assert_same_tokens, greedy_request, last_chunk_of, play_workload
from tests.engine.support.oracle import VOCAB, save_tiny
from tests.engine.support.recorded_graphs import GatheringStep, Recording, graphed, record_as_on_gpus

WIDTHS = (2, 4)


def config_for(model: Path, **settings: Any) -> EngineConfig:
    given: dict[str, Any] = {"kv_pages": 64, "max_running": 7, "max_step_tokens": 24, "threads": 1}
    given |= {"overlap": False, "windowed_kv": "off", "max_model_len": 80, **settings}
    return EngineConfig(str(model), device="cpu", attention="reference", page_size=4, **given)


def drafted(request: Request, drafts: list[int], pages: list[int]) -> Chunk:
    """Return the chunk of a request's last token and draft tokens."""
    ids = [request.tokens[-1], *drafts]
    return Chunk(request, request.num_tokens - 1, len(ids), ids, pages, samples=True, num_drafts=len(drafts))


def prompt(name: str, length: int, pages: list[int]) -> Chunk:
    request = greedy_request(name, length)
    request.tokens[:] = [token % VOCAB for token in request.tokens]
    return Chunk(request, 0, length, request.tokens, pages, samples=True)


def with_slot(chunk: Chunk, slot: int) -> Chunk:
    return msgspec.structs.replace(chunk, state=StateStep(slot if chunk.start else None, slot, 0, ()))


OVERLAPPED, SPECULATES = {"overlap": True}, {"speculation": Speculation(max_drafts=3)}


@pytest.mark.parametrize(
    ("settings", "spreads", "widths"),
    [
        ({}, False, ()),
        ({}, True, WIDTHS),
        (OVERLAPPED, False, WIDTHS),
        (OVERLAPPED, True, ()),
        (SPECULATES, False, ()),
        (SPECULATES, False, WIDTHS),
        (SPECULATES, True, WIDTHS),
    ],
)
def test_workloads_get_the_tokens_of_steps_without_graphs(
    model: Path, settings: dict[str, Any], spreads: bool, widths: tuple[int, ...]
) -> None:
    """All steps are of graphs: decodes, prompts beside decodes, and draft tokens that are verified. Graphs are
    in pieces or whole, and there are some for draft tokens or none: all pairs of these and of the settings.
    """
    config = config_for(model, kv_pages=36, **settings)
    runner, recording = graphed(config, config.max_step_tokens, widths, spreads=spreads)
    got, _ = play_workload(Engine(config, runner), 3)
    expected, _ = play_workload(Engine(config, load_model(config)), 3)
    assert_same_tokens(got, expected)
    assert recording.num_replayed > 20 and (recording.num_cuts > 0) == (not spreads)
    assert not runner.pages.data[:, :, runner.pages.null_page].any()


@pytest.mark.parametrize("windowed_kv", ["on", "off"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_layers_with_a_window_are_recorded_with_page_tables_of_their_own_and_without(
    tmp_path: Path, family: str, windowed_kv: str
) -> None:
    """Decodes, draft tokens and prompts of requests that leave their windows get the tokens of eager steps."""
    settings = {"speculation": Speculation(max_drafts=3, adaptive=False), "windowed_kv": windowed_kv}
    config = config_for(save_tiny(family, tmp_path), kv_pages=90, **settings)
    runner, recording = graphed(config, config.max_step_tokens, WIDTHS)
    assert (runner.layer_groups is not None) == (windowed_kv == "on")
    got, _ = play_workload(Engine(config, runner), 5)
    expected, _ = play_workload(Engine(config, load_model(config)), 5)
    assert_same_tokens(got, expected)
    assert recording.num_replayed > 20 and recording.num_cuts > 0
    assert not runner.pages.data[:, :, runner.pages.null_page].any()


def test_latent_kv_is_recorded_too(tmp_path: Path) -> None:
    """Decodes, draft tokens, and prompts in pieces, of which a result has fewer numbers than its query."""
    speculation = Speculation(max_drafts=3, adaptive=False)
    config = config_for(save_tiny("deepseek_v3", tmp_path), kv_pages=36, speculation=speculation)
    runner, recording = graphed(config, config.max_step_tokens, WIDTHS)
    got, _ = play_workload(Engine(config, runner), 3)
    expected, _ = play_workload(Engine(config, load_model(config)), 3)
    assert_same_tokens(got, expected)
    assert recording.num_replayed > 20 and recording.num_cuts > 0
    assert not runner.pages.data[:, :, runner.pages.null_page].any()


@pytest.mark.parametrize("family", ["gemma4", "gemma4_small", "gemma4_moe", "llama4"])
def test_layers_that_attend_differently_are_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """Prompts in pieces, by heads of two sizes or within chunks; draft tokens as a whole, except within chunks."""
    speculation = Speculation(max_drafts=3, adaptive=False, min_match=1)
    model = save_tiny(family, tmp_path, eos_token_id=7)
    config = config_for(model, kv_pages=60, speculation=speculation)
    expected, _ = play_workload(Engine.from_config(config), 3)
    recordings = record_as_on_gpus(monkeypatch)
    engine, steps = Engine.from_config(replace(config, cuda_graphs="lazy")), list[StepStats]()
    engine.loop.on_step = steps.append
    with counted_replays(DraftSize) as drafts:
        got, _ = play_workload(engine, 3)
    assert_same_tokens(got, expected)
    assert (drafts.count(True) > 5) == (family != "llama4")
    assert sum(step.is_replayed for step in steps if step.num_prefill_tokens) > 5
    assert sum(recording.num_cuts for recording in recordings) > 40


@pytest.mark.parametrize(
    "settings",
    [
        {},
        OVERLAPPED,
        {"speculation": Speculation(max_drafts=3, adaptive=False, min_match=1)},
        {"preemption": "swap", "host_kv_gib": 0.01},
    ],
)
def test_states_advance_between_pieces(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Prompts next to decodes, which keep states at borders, resume from them, and follow draft tokens."""
    model = save_tiny("qwen3_next", tmp_path, eos_token_id=7)
    config = config_for(model, kv_pages=36, **settings)
    widths = WIDTHS if config.speculation else ()
    runner, recording = graphed(config, config.max_step_tokens, widths, spreads=True)
    got, _ = play_workload(Engine(config, runner), 3)
    expected, _ = play_workload(Engine(config, load_model(config)), 3)
    assert_same_tokens(got, expected)
    assert recording.num_replayed > 20 and recording.num_cuts > 10 * runner.model_config.num_layers
    states = runner.pages.states
    assert states is not None
    for index in range(runner.model_config.num_recurrent_layers):
        layer = states.layer(index)
        assert not layer.inputs[states.null_slot].any() and not layer.matrices[states.null_slot].any()


def test_padding_of_pieces_advances_no_state(tmp_path: Path) -> None:
    """A prompt of 9 tokens in the graphs of 16, next to a decode and after the same step with other tokens."""
    config = config_for(save_tiny("qwen3_next", tmp_path), max_running=3)
    runner, _ = graphed(config, max_tokens=24)
    plain = load_model(config)
    decode, kept = last_chunk_of(greedy_request("d", 6), [0, 1]), [plain.pages.states, runner.pages.states]
    for replayed in (False, True):
        plan = StepPlan((with_slot(decode, 1), with_slot(prompt("p", 9, [2, 3, 4]), 0)))
        for states in kept:
            assert states is not None
            for index in range(runner.model_config.num_recurrent_layers):
                states.layer(index).matrices[: states.null_slot] = 0.5 + replayed
        result = runner.run(plan)
        assert result.is_replayed == replayed and result.token_ids == plain.run(plan).token_ids
        for index in range(runner.model_config.num_recurrent_layers):
            theirs, ours = (states.layer(index).matrices for states in kept if states is not None)
            torch.testing.assert_close(ours[:2], theirs[:2])
            assert (ours[2:-1] == 0.5 + replayed).all()


def test_rows_with_any_number_of_drafts_are_one_graph(model: Path) -> None:
    """Rows of 3, 1 and 2 tokens take the graph of 4 rows of 4 tokens, with attention in it."""
    config = config_for(model)
    runner, recording = graphed(config, max_tokens=24, widths=WIDTHS)
    plain = load_model(config)
    requests = [greedy_request(f"r{i}", 6 + i) for i in range(3)]
    for step, drafts in enumerate([[[30, 31], [], [32]], [[], [7], [33, 34]], [[1], [2], [3]]]):
        chunks = [
            drafted(r, d, list(range(4 * i, 4 * i + 4)))
            for i, (r, d) in enumerate(zip(requests, drafts, strict=True))
        ]
        plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens)))
        got, expected = runner.run(plan), plain.run(plan)
        assert (got.token_ids, got.counts) == (expected.token_ids, expected.counts)
        assert got.is_replayed == (step == 1), "sizes come for the first time in steps 0 and 2"
    assert (recording.num_recorded, recording.num_cuts) == (2, 0)


def test_short_prompts_next_to_decodes_replay_all_but_attention(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention gets the step's own rows, unpadded; its layers are cut where it is computed."""
    seen: list[tuple[int, bool]] = []
    prepare = ReferenceAttention.prepare

    def noting(self: Any, batch: AttentionBatch, null_page: int) -> Any:
        seen.append((len(batch.positions), batch.is_bounded))
        return prepare(self, batch, null_page)

    monkeypatch.setattr(ReferenceAttention, "prepare", noting)
    config = config_for(model)
    runner, recording = graphed(config, max_tokens=24)
    plain = load_model(config)
    decode = last_chunk_of(greedy_request("d", 6), [0, 1])
    for length, replayed in ((9, False), (11, True), (20, False), (7, False)):
        seen.clear()
        plan = StepPlan((decode, prompt("p", length, list(range(2, 8)))))
        cuts = recording.num_cuts
        result = runner.run(plan)
        assert seen == [(length + 1, False)] and result.is_replayed == replayed
        assert recording.num_cuts - cuts == runner.model_config.num_layers
        assert result.token_ids == plain.run(plan).token_ids
    assert recording.num_recorded == 3, "for 16, 24 and 8 tokens"
    assert not runner.run(StepPlan((prompt("long", 25, list(range(2, 9))),))).is_replayed


def test_few_tokens_of_prompts_are_rows_of_their_own_in_one_graph(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode and two prompts, one of which goes on after what it computed before, in the graph of 24 tokens."""
    seen: list[tuple[int, list[int]]] = []
    attend = GatheringStep.attend

    def noting(self: Any, *args: Any) -> torch.Tensor:
        seen.append((self.batch.num_decodes, self.batch.kv_lens.tolist()))
        return attend(self, *args)

    monkeypatch.setattr(GatheringStep, "attend", noting)
    config = config_for(model, max_step_tokens=64)
    runner, recording = graphed(config, max_tokens=64, spreads=True)
    plain = load_model(config)
    decode = last_chunk_of(greedy_request("d", 6), [0, 1])
    for step, length in enumerate((12, 9, 14)):
        later = prompt(f"l{step}", 20, list(range(8, 13)))
        begun = StepPlan((Chunk(later.request, 0, 11, later.token_ids[:11], later.pages, samples=False),))
        for each in (runner, plain):
            each.run(begun)
        rest = Chunk(later.request, 11, 9, later.token_ids[11:], later.pages, samples=True)
        seen.clear()
        plan = StepPlan((decode, prompt(f"p{step}", length, list(range(2, 8))), rest))
        result = runner.run(plan)
        lens = [6, *range(1, length + 1), *range(12, 21)]
        assert seen[0] == (24, lens + [0] * (24 - len(lens)))
        assert result.is_replayed == (step > 0) and result.token_ids == plain.run(plan).token_ids
    assert (recording.num_recorded, recording.num_cuts) == (2, 0), "of 24 tokens, and of the 11 before"


def test_a_prompt_of_more_tokens_is_computed_in_pieces(model: Path) -> None:
    """What it does not share would be read once for each of its tokens. Beside others there may be more in all."""
    config = config_for(model, max_step_tokens=512, kv_pages=128, max_model_len=160)
    runner, recording = graphed(config, spreads=True)
    graphs = runner.add_token_graphs(config.max_running, 512, (), recording)
    assert graphs.num_graphs == len(spread_sizes(512)) + 4, "of 192 to 512 tokens: fewer are rows of their own"
    plain = load_model(config)
    for lens, num_cuts in (((128,), 0), ((129,), 1), ((100, 100), 0), ((128, 128, 1), 1)):
        first = [sum(-(-n // 4) for n in lens[:at]) for at in range(len(lens))]
        chunks = [prompt(f"p{at}", n, list(range(first[at], first[at] + -(-n // 4)))) for at, n in enumerate(lens)]
        before = recording.num_cuts
        result = runner.run(plan := StepPlan(tuple(chunks)))
        assert result.token_ids == plain.run(plan).token_ids
        assert recording.num_cuts - before == num_cuts * runner.model_config.num_layers


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("widths", [(), WIDTHS])
def test_padding_writes_only_into_the_page_of_empty_rows(
    model: Path, widths: tuple[int, ...], spreads: bool
) -> None:
    runner, _ = graphed(config_for(model), max_tokens=24, widths=widths, spreads=spreads)
    chunks = [drafted(greedy_request(f"r{i}", 6), [40, 41][:i], [2 * i, 2 * i + 1]) for i in range(3)]
    for _ in range(2):
        runner.pages.data.fill_(0.5)
        runner.run(StepPlan(tuple(chunks)))
        changed = (runner.pages.data != 0.5).any(dim=(0, 1, 4, 5)).nonzero().tolist()
        assert changed == [[1, 1], [3, 1], [3, 2], [5, 1], [5, 2], [5, 3], [runner.num_pages, 0]]


@pytest.mark.parametrize("spreads", [False, True])
def test_a_step_that_failed_leaves_nothing_to_the_next(
    model: Path, monkeypatch: pytest.MonkeyPatch, spreads: bool
) -> None:
    runner, _ = graphed(config_for(model), max_tokens=24, widths=WIDTHS, spreads=spreads)
    plan = StepPlan((prompt("p", 9, [2, 3, 4]),))
    expected = runner.run(plan).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(type(runner.attention), "prepare", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.run(plan)
    assert runner.run(plan).token_ids == expected


@pytest.mark.parametrize("spreads", [False, True])
def test_a_draft_models_steps_are_replayed(model: Path, spreads: bool) -> None:
    """It drafts the tokens that it drafts without graphs; after the first ones, no step of its is eager."""
    config = config_for(model)
    runner, recording = graphed(config, max_tokens=24, widths=(1, 2, 4), spreads=spreads)
    drafters = [DraftModel(made, [7]) for made in (runner, load_model(config))]
    requests = [[greedy_request(f"r{i}", 6 + i) for i in range(2)] for _ in drafters]
    for accepted in (0, 1, 3, 0, 3, 1, 1):
        drafts = [drafter.propose(mine, [3, 3]) for drafter, mine in zip(drafters, requests, strict=True)]
        assert drafts[0] == drafts[1]
        for mine in requests:
            for request, draft in zip(mine, drafts[1], strict=True):
                request.tokens += [*draft[:accepted], 50 + accepted]
    assert recording.num_replayed > 12


def test_a_draft_model_is_loaded_with_graphs_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has as many pages as the model, and one more for padding; its tokens are those without graphs."""
    recording = Recording()
    speculation = Speculation("draft_model", model=str(model), max_drafts=3, adaptive=False)
    config = config_for(model, speculation=speculation, cuda_graphs="lazy")
    expected, _ = play_workload(Engine.from_config(config), 5)
    monkeypatch.setattr(loading, "draft_graph_bytes", lambda *_: 1)
    monkeypatch.setattr(loading, "CudaCapture", lambda _: recording)
    engine = Engine.from_config(config)
    drafter = engine.scheduler.speculator.drafter
    assert isinstance(drafter, DraftModel) and drafter.cache.num_pages == engine.cache.num_pages
    got, _ = play_workload(engine, 5)
    for name in expected:
        length = min(len(got[name]), len(expected[name]))
        assert got[name][:length] == expected[name][:length]
    assert recording.num_replayed > 20


def test_sizes() -> None:
    assert draft_sizes([5], 300)[-1] == (64, 5) and draft_sizes([9], 300)[-1] == (32, 9)
    assert draft_sizes([2, 3], 3) == [(1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)]
    assert draft_sizes([65], 300)[-1] == (4, 65) and draft_sizes([], 300) == []
    assert piece_sizes(512) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert piece_sizes(40) == [8, 16, 24, 32, 40] and piece_sizes(5) == [5]
    assert piece_sizes(300, above=128) == [192, 256, 300] and piece_sizes(128, above=128) == piece_sizes(0) == []
    assert spread_sizes(512)[-3:] == [128, 192, 256] and spread_sizes(40) == piece_sizes(40)
    assert spread_sizes(0) == []


def test_a_step_of_which_too_much_would_be_padding_is_not_one_graph() -> None:
    def layers(ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        raise AssertionError("only sizes are asked for")

    drafts = DraftGraphs(layers, draft_sizes((5,), 64), 80, 4, 0, torch.zeros(1, 1), Recording())

    def size(*lens: int) -> Any:
        rows = [
            drafted(greedy_request(f"r{i}", 6), [1] * (n - 1), [0, 1, 2, 3]) for i, n in enumerate(sorted(lens))
        ]
        return drafts.size_of(AttentionBatch.from_chunks(rows, 4, 63))

    assert size(5) == (1, 5) and size(1, 2) == (2, 5) and size(*[1] * 16) == (16, 5)
    assert size(*[1] * 32) is None and size(*[5] * 32) == (32, 5)
    assert size(6) is None and size(*[5] * 65) is None


def test_a_row_of_one_token_takes_the_graph_of_those_that_it_replays() -> None:
    row = msgspec.structs.replace(drafted(greedy_request("r", 6), [], [0, 1]), state=StateStep(0, 0, 4, ()))
    batch = AttentionBatch.from_chunks([row], 4, 63, null_slot=9)
    sizes, hidden = draft_sizes((2, 5), 64), torch.zeros(1, 1)
    assert DraftGraphs(lambda ids, batch: ids, sizes, 80, 4, 0, hidden, Recording()).size_of(batch) == (1, 5)


class Cuda:
    """Stands in for torch.cuda: notes what is recorded, and what a replay does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.recording: list[str] | None = None
        cuda = self

        class Graph:
            def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
                assert cuda.recording is None and capture_error_mode == "thread_local"
                self.kernels = cuda.recording = []

            def capture_end(self) -> None:
                assert cuda.recording is not None
                cuda.recording = None

            def replay(self) -> None:
                cuda.said.append("replay " + " ".join(self.kernels))

        class Nothing:
            def __init__(self, *_: Any) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: Any) -> None: ...

        fakes = {"CUDAGraph": Graph, "Stream": Nothing, "stream": Nothing, "graph_pool_handle": lambda: 0}
        for name, fake in (fakes | {"synchronize": Nothing, "empty_cache": Nothing}).items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def launch(self, kernel: str) -> None:
        (self.said if self.recording is None else self.recording).append(kernel)


def test_pieces_are_replayed_in_order_with_the_work_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))

    def work() -> None:
        for layer in range(2):
            cuda.launch(f"qkv{layer}")
            capture.cut(partial(cuda.launch, f"attention{layer}"))
            cuda.launch(f"mlp{layer}")

    work()
    assert cuda.said == ["qkv0", "attention0", "mlp0", "qkv1", "attention1", "mlp1"], "eager"
    cuda.said.clear()
    replay = capture(work)
    assert cuda.said == [], "nothing runs while it is recorded"
    for _ in range(2):
        cuda.said.clear()
        replay()
        assert cuda.said == ["replay qkv0", "attention0", "replay mlp0 qkv1", "attention1", "replay mlp1"]
    whole = capture(lambda: cuda.launch("all"))
    cuda.said.clear()
    whole()
    assert cuda.said == ["replay all"]


def test_a_failure_during_a_recording_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))

    def work() -> None:
        capture.cut(lambda: None)
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(work)
    assert cuda.recording is None
    capture(lambda: cuda.launch("next"))()
    assert cuda.said == ["replay next"]
