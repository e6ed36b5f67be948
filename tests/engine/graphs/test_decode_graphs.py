"""Whole workloads with recorded decode steps get the same tokens as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.batch import AttentionBatch
from engine.grammar.compiler import Compiler
from engine.grammar.constraint import Constraint
from engine.grammar.failure import GrammarFailure
from engine.grammar.spec import Grammar
from engine.grammar.vocabulary import Vocabulary
from engine.graphs import step_graphs
from engine.graphs.step_graphs import DecodeSizes, StepGraphs, contexts_up_to, next_size, sizes_up_to
from engine.loading.load_model import load_model
from engine.program.engine import Engine
from engine.runner.model_runner import ModelRunner
from engine.sampling.graph_chooser import _uniform, fits_graph, torch_graph_chooser
from engine.sampling.noise import uniform
from engine.settings.config import EngineConfig
from engine.values.beam_search import BeamParams
from engine.values.plan import Chunk, StepPlan
from engine.values.request import PENDING, Request
from tests.engine.support.grammar_models import EOS, ids, save_random, tokenizer
from tests.engine.support.graph_workloads import (
    assert_same_tokens,
    greedy_request,
    last_chunk_of,
    play_greedily,
    play_workload,
)
from tests.engine.support.oracle import save_tiny
from tests.engine.support.recorded_graphs import GatheringAttention, graphed, record_as_on_gpus
from tests.engine.support.sampling_rows import assert_same_logprobs, row_params
from tests.engine.support.steps_by_hand import RequestByHand, pages_of, random_prompt, run_step

PAGE_SIZE = 4


@pytest.fixture(scope="module")
def grammar_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("grammars"))


def config_for(model: Path, **settings: Any) -> EngineConfig:
    given = {"page_size": PAGE_SIZE, "kv_pages": 64, "max_running": 7, "max_step_tokens": 24, "threads": 1}
    shared: dict[str, Any] = {"device": "cpu", "attention": "reference", "max_model_len": 80, "windowed_kv": "off"}
    return EngineConfig(str(model), **{**shared, **given, **settings})


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"preemption": "swap", "host_kv_gib": 0.001}])
def test_workloads_get_the_tokens_of_steps_without_graphs(model: Path, settings: dict[str, Any]) -> None:
    """Requests join, leave, abort, share prefixes, grow, are preempted and resumed from elsewhere."""
    preempted = swapped = 0
    for seed in range(4):
        config = config_for(model, kv_pages=36, **{"overlap": False, **settings})
        runner, recording = graphed(config)
        assert runner.num_pages == 36
        got, load = play_workload(Engine(config, runner), seed)
        expected, _ = play_workload(Engine(config, load_model(config)), seed)
        assert_same_tokens(got, expected)
        assert recording.num_replayed > 20
        assert not runner.pages.data[:, :, runner.pages.null_page].any()
        preempted, swapped = preempted + load.num_preemptions, swapped + load.num_swapped
    assert preempted > 0
    assert swapped > 0 or "preemption" not in settings


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_5", {}),
        ("qwen3_next", {"overlap": True}),
        ("qwen3_next", {"preemption": "swap", "host_kv_gib": 0.01}),
    ],
)
def test_recurrent_models_get_the_tokens_of_steps_without_graphs(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Prefixes are resumed from states that others keep; the state before a text stays zero."""
    config = config_for(save_tiny(family, tmp_path, eos_token_id=7), kv_pages=36, **{"overlap": False, **settings})
    runner, recording = graphed(config)
    states = runner.pages.states
    assert states is not None and runner.num_state_slots == states.num_slots - 1
    got, load = play_workload(Engine(config, runner), 2)
    expected, _ = play_workload(Engine(config, load_model(config)), 2)
    assert_same_tokens(got, expected)
    assert recording.num_replayed > 20 and load.num_preemptions > 0
    for index in range(runner.model_config.num_recurrent_layers):
        layer = states.layer(index)
        assert not layer.inputs[states.null_slot].any() and not layer.matrices[states.null_slot].any()
        assert layer.matrices[runner.num_state_slots].any(), "rows without a request wrote here"


@pytest.mark.parametrize("family", ["gemma4", "gemma4_small", "gemma4_moe", "llama4"])
def test_models_whose_layers_attend_differently_get_the_tokens_of_steps_without_graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """By heads of two sizes, with and without a window, with KV of other layers or with experts, or within chunks
    of 16 tokens.
    """
    config = config_for(save_tiny(family, tmp_path, eos_token_id=7), kv_pages=36, overlap=False)
    expected, _ = play_workload(Engine(config, load_model(config)), 2)
    recordings = record_as_on_gpus(monkeypatch)
    got, load = play_workload(Engine.from_config(replace(config, cuda_graphs="lazy")), 2)
    assert_same_tokens(got, expected)
    assert sum(recording.num_replayed for recording in recordings) > 20 and load.num_preemptions > 0


def test_padding_writes_only_into_the_page_of_empty_rows(model: Path) -> None:
    """Three rows use a graph of four: their three slots change, and one slot of the page of empty rows."""
    runner, recording = graphed(config_for(model))
    chunks = [last_chunk_of(greedy_request(f"r{i}", 6), [2 * i, 2 * i + 1]) for i in range(3)]
    for _ in range(2):
        runner.pages.data.fill_(0.5)
        tokens = runner.run(StepPlan(tuple(chunks))).token_ids
        changed = (runner.pages.data != 0.5).any(dim=(0, 1, 4, 5)).nonzero().tolist()
        assert changed == [[1, 1], [3, 1], [5, 1], [runner.num_pages, 0]]
        chunks.reverse()
    assert recording.num_recorded == recording.num_replayed == 2, "the forward pass, and sampling"
    assert len(set(tokens)) == 1, "they are the same request thrice"


def test_steps_by_hand_get_the_tokens_of_steps_without_graphs(model: Path) -> None:
    """Tests of kernels compute models so, with graphs where there is a GPU."""

    def tokens(runner: ModelRunner) -> list[list[int]]:
        rows = [
            RequestByHand(random_prompt(length, seed=length), pages_of(PAGE_SIZE, 32 * index, 32))
            for index, length in enumerate((5, 9, 3))
        ]
        for _ in range(4):
            run_step(runner, [(row, None) for row in rows])
        return [row.request.tokens for row in rows]

    runner, recording = graphed(config_for(model))
    assert tokens(runner) == tokens(load_model(config_for(model)))
    assert recording.num_replayed


def test_long_prompts_get_the_tokens_of_steps_without_graphs(model: Path) -> None:
    """What a GPU in float32 is compared with a CPU by."""
    config = config_for(model, page_size=16, kv_pages=256, max_model_len=256, max_step_tokens=64, overlap=False)
    runner, recording = graphed(config, max_tokens=64)
    expected = play_greedily(Engine(config, load_model(config)))
    assert play_greedily(Engine(config, runner)) == expected
    assert recording.num_replayed and {len(tokens) for tokens in expected.values()} == {30}


def test_a_step_reports_whether_it_was_replayed(model: Path) -> None:
    runner, _ = graphed(config_for(model))

    def replayed(*requests: Request) -> bool:
        chunks = [last_chunk_of(r, list(range(4 * i, 4 * i + 4))) for i, r in enumerate(requests)]
        return runner.run(StepPlan(tuple(chunks))).is_replayed

    plain = greedy_request("a", 6)
    assert not replayed(plain), "its size comes for the first time"
    assert replayed(plain)
    assert replayed(greedy_request("b", 9, temperature=0.7))
    assert replayed(greedy_request("b", 9, top_k=3)), "greedy it is"
    for asked in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert replayed(greedy_request("c", 6, temperature=0.7, **asked))
    others: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"presence_penalty": 1.0},
        {"min_tokens": 2},
        {"logit_bias": {3: 1.0}},
    ]
    for asked in others:
        assert replayed(greedy_request("c", 6, **asked))
    elsewhere: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {"beams": BeamParams(2, 2)}]
    for asked in elsewhere:
        assert not replayed(greedy_request("c", 6, **asked)), "hidden states and beams are for other steps"
    assert replayed(plain)
    prompt = Chunk(greedy_request("d", 6), 3, 3, [13, 14, 15], [0, 1], samples=True)
    assert not runner.run(StepPlan((prompt,))).is_replayed
    part = Chunk(greedy_request("d", 6), 3, 1, [13], [0, 1], samples=False)
    assert not runner.run(StepPlan((part,))).is_replayed
    assert not runner.run(StepPlan()).is_replayed


def test_a_row_that_asks_for_more_costs_a_step_only_its_recorded_sampling(model: Path) -> None:
    """The sampler reads the logits that the graph left, and the tokens are those of steps without graphs."""
    config = config_for(model)
    runner, recording = graphed(config)
    plain = load_model(config)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.7, "logprobs": 2},
        {"repetition_penalty": 1.4, "logit_bias": {40: 3.0}},
    ]
    requests = [greedy_request(f"r{i}", 6 + i, **params) for i, params in enumerate(asked)]
    for step in range(4):
        known = StepPlan(tuple(last_chunk_of(r, list(range(4 * i, 4 * i + 4))) for i, r in enumerate(requests)))
        pending = [c if step == 0 else replace_ids(c, [PENDING]) for c in known.chunks]
        before = recording.num_replayed
        got, expected = runner.run(StepPlan(tuple(pending[::-1]))), plain.run(known)
        assert got.token_ids[::-1] == list(expected.token_ids)
        for ours, other in zip(got.logprobs[::-1], expected.logprobs, strict=True):
            assert_same_logprobs(ours, other)
        assert recording.num_replayed - before == (step > 0)
        for request, token in zip(requests, expected.token_ids, strict=True):
            request.tokens.append(token)
    assert recording.num_recorded == 1, "no step's sampling was recorded"


def test_grammars_are_masks_in_a_recorded_sampler(grammar_model: Path) -> None:
    """Rows with a grammar come, leave and change places among rows without; one breaks, and only it notices."""
    config = config_for(grammar_model)
    runner, recording = graphed(config)
    plain = load_model(config)
    size = plain.model_config.vocab_size
    compiler = Compiler(lambda: Vocabulary.of(tokenizer(), size, [EOS]))
    asked: list[tuple[dict[str, Any], Grammar | None]] = [
        ({"temperature": 0.8}, None),
        ({}, Grammar("regex", "(yes|no|maybe so) [a-z]{30}")),
        ({"temperature": 1.0, "min_tokens": 3}, Grammar("regex", "[a-z ]{30,90}")),
        ({"temperature": 1.0}, Grammar("regex", "[0-9]+")),
    ]
    requests = [greedy_request(f"r{i}", 6 + i, **params) for i, (params, _) in enumerate(asked)]
    requests[3].tokens += ids("zebra")  # no beginning of what its grammar allows
    replays = []
    for members in ((0, 1), (1, 0, 2), (2, 0, 3), (2, 0), (3, 2, 0, 1)):
        found = []
        before = recording.num_replayed
        for run in (runner, plain):
            for request, (_, grammar) in zip(requests, asked, strict=True):
                request.constraint = None if grammar is None else Constraint(compiler.compile(grammar))
            chunks = [last_chunk_of(requests[i], list(range(4 * i, 4 * i + 4))) for i in members]
            found.append(list(run.run(StepPlan(tuple(chunks))).token_ids))
        replays.append(recording.num_replayed - before)
        assert found[0] == found[1]
        for member, token in zip(members, found[0], strict=True):
            assert (token == GrammarFailure.DEFECT) == (member == 3)
            requests[member].tokens.append(token if token >= 0 else 5)
    assert replays == [0, 0, 2, 2, 2], "the layers, and masked sampling, once their sizes have come before"
    other = greedy_request("other", 6)
    for _ in range(2):
        alone = last_chunk_of(other, [0, 1])
        got = runner.run(StepPlan((alone, last_chunk_of(requests[0], [2, 3, 4]))))
        assert plain.run(StepPlan((alone,))).token_ids[0] == got.token_ids[0], "nothing stays forbidden"


def test_rows_with_top_k_top_p_or_min_p_are_chosen_from_in_a_recorded_sampler(model: Path) -> None:
    """Such rows come, leave and change places among rows without, and leave nothing to who takes their places."""
    runner, recording = graphed(config_for(model))
    plain = load_model(config_for(model))
    asked: list[dict[str, Any]] = [{"top_p": 0.6}, {"top_k": 3}, {}, {"min_p": 0.4}, {"top_k": 20, "top_p": 0.9}]
    requests = [greedy_request(f"r{i}", 6 + i, **{"temperature": 3.0, **one}) for i, one in enumerate(asked)]
    replays = []
    for members in ((0, 1, 2), (0, 1, 2), (2, 1, 4), (3, 2, 4), (2, 3, 0), (1, 4, 2), (2,), (2,)):
        chunks = [last_chunk_of(requests[i], list(range(4 * i, 4 * i + 4))) for i in members]
        before = recording.num_replayed
        tokens = list(runner.run(StepPlan(tuple(chunks))).token_ids)
        replays.append(recording.num_replayed - before)
        assert tokens == list(plain.run(StepPlan(tuple(chunks))).token_ids)
        for member, token in zip(members, tokens, strict=True):
            requests[member].tokens.append(token)
    assert replays == [0, 2, 2, 2, 2, 2, 0, 2], "the layers, and sampling, once their sizes have come before"
    assert len(set(requests[2].tokens[8:])) > 3


def replace_ids(chunk: Chunk, token_ids: list[int]) -> Chunk:
    return Chunk(chunk.request, chunk.start, 1, token_ids, chunk.pages, samples=True)


def test_min_tokens_and_prompt_logprobs_prevent_graphs_no_longer_than_they_last() -> None:
    late = greedy_request("a", 6, min_tokens=2)
    assert not fits_graph(last_chunk_of(late, [])), "no token was generated yet"
    late.tokens += [1]
    assert not fits_graph(last_chunk_of(late, []))
    late.tokens += [1]
    assert fits_graph(last_chunk_of(late, []))
    scored = greedy_request("a", 6, prompt_logprobs=1)
    assert not fits_graph(Chunk(scored, 4, 1, [14], [], samples=True))
    scored.tokens += [1]
    assert fits_graph(last_chunk_of(scored, []))


def test_after_a_failed_step_rows_are_written_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step prepared before the failure was known fails too; later steps do not."""
    runner, _ = graphed(config_for(model))
    r, pages = greedy_request("a", 6), [0, 1, 2, 3]
    expected = []
    for _ in range(3):
        expected.append(runner.run(StepPlan((last_chunk_of(r, pages),))).token_ids[0])
        r.tokens.append(expected[-1])
    del r.tokens[-2:]
    plan = StepPlan((last_chunk_of(r, pages),))
    failing, after = runner.prepare(plan), runner.prepare(plan)
    with monkeypatch.context() as patch:
        patch.setattr(type(runner.pages), "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing()
    with pytest.raises(RuntimeError, match="rows are out of date"):
        after()
    assert runner.run(StepPlan((last_chunk_of(r, pages),))).token_ids[0] == expected[1]


def test_a_row_without_valid_choice_gets_none_and_its_neighbour_does_not_notice(model: Path) -> None:
    runner, _ = graphed(config_for(model))
    healthy, broken = last_chunk_of(greedy_request("a", 6), [0, 1]), last_chunk_of(greedy_request("b", 6), [2, 3])
    alone = runner.run(StepPlan((healthy,))).token_ids[0]
    runner.pages.data[:, :, 2] = torch.nan
    for _ in range(2):
        assert runner.run(StepPlan((broken, healthy))).token_ids == [-1, alone]


def test_sizes() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(7) == [1, 2, 4, 7]
    assert sizes_up_to(100)[-3:] == [88, 96, 100]
    assert sizes_up_to(256) == sizes_up_to(1000) == [1, 2, 4, *range(8, 257, 8)]
    assert [next_size(sizes_up_to(20), count) for count in (1, 3, 8, 9, 20, 21)] == [1, 4, 8, 16, 20, None]


def test_short_rows_have_graphs_of_their_own_where_attention_asks_for_bounds() -> None:
    assert contexts_up_to(40_000, is_planned=False) == [40_000]
    assert contexts_up_to(40_000, is_planned=True) == [1024, 8192, 40_000]
    assert contexts_up_to(600, is_planned=True) == [600]
    sizes = DecodeSizes([1, 32, 40], contexts_up_to(40_000, is_planned=True))
    assert len(sizes.all) == 3 + 3 + 1, "with 40 rows no row is cut, however long it is"
    assert sizes.of(1, 1024) == (1, 1024) and sizes.of(2, 1025) == (32, 8192)
    assert sizes.of(32, 8193) == (32, 40_000) and sizes.of(33, 5) == (40, 40_000)
    assert sizes.of(41, 5) is None and sizes.of(1, 40_001) is None


def test_attention_that_plans_by_bounds_gets_those_of_the_rows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of short rows replays a graph recorded for short rows, and tokens are those without graphs."""
    monkeypatch.setattr(step_graphs, "_CONTEXTS", (8, 16))
    monkeypatch.setattr(GatheringAttention, "plans_by_bounds", True)
    prepared: list[tuple[int, int]] = []
    prepare = GatheringAttention.prepare

    def noting(self: Any, batch: AttentionBatch, null_page: int) -> Any:
        if batch.num_decodes == len(batch.query_lens):
            prepared.append((max(batch.kv_lens_host), batch.block_table.shape[1]))
        return prepare(self, batch, null_page)

    monkeypatch.setattr(GatheringAttention, "prepare", noting)
    config = config_for(model)
    runner, recording = graphed(config)
    plain, request = load_model(config), greedy_request("r", 6)
    pages = list(range(8))
    for _ in range(14):
        plan = StepPlan((last_chunk_of(request, pages),))
        token = plain.run(plan).token_ids[0]
        assert runner.run(plan).token_ids == [token]
        request.tokens.append(token)
    assert [bounds for bounds, before in zip(prepared, [None, *prepared], strict=False) if bounds != before] == [
        (8, 2),
        (16, 4),
        (80, 20),
    ]
    assert recording.num_recorded == 3 + 1, "the forward passes, and sampling"


def test_all_sizes_are_recorded_the_largest_first_after_they_have_run() -> None:
    said: list[Any] = []

    def capture(work: Any) -> Any:
        said.append("record")
        return lambda: said.append("replay")

    graphs = StepGraphs([1, 2, 4], said.append, capture)
    graphs.capture_all()
    assert said == [4, "record", 2, "record", 1, "record"]
    assert graphs.run(2) and said[6:] == ["replay"]


def test_a_step_that_cannot_be_recorded_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def capture(work: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    graphs = StepGraphs([1, 2], ran.append, capture)
    assert not graphs.run(2) and not graphs.run(2)
    assert ran == [2, 2]
    assert len(caplog.records) == 1 and "no memory" in caplog.text


def test_plain_choice_is_that_of_the_sampler() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator)
    positions = torch.randint(0, 5000, (200,), generator=generator)
    expected = uniform(seeds.tolist(), positions.tolist())
    assert _uniform(seeds, positions).tolist() == expected.tolist()
    logits = torch.randn(3, 50, generator=generator)
    logits[0, 4] = logits[0, 9] = 9.0
    logits[1, 3] = torch.nan
    params = row_params(seeds[:3], [0.0, 1.0, 1e308])
    chosen = torch_graph_chooser(logits, params, positions[:3], cuts=False)
    assert chosen.tolist() == [4, -1, int(logits[2].argmax())]
