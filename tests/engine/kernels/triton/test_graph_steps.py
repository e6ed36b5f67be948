"""The steps that a GPU records, without the recording: Triton kernels on static tensors, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.graphs.chain_graphs import ChainSize
from engine.kernels.triton import sample
from engine.kernels.triton.shared_prefixes import RowGroups
from engine.kernels.triton.tile import TILE
from engine.loading.load_model import load_model
from engine.runner.draft_model import DraftModel
from engine.sampling.graph_chooser import torch_graph_chooser, triton_graph_chooser
from engine.settings.config import EngineConfig
from engine.values.plan import Chunk, StepPlan
from engine.values.request import PENDING
from tests.engine.support.checkpoints import AWQ, FP8_BLOCKS, awq, fp8_blocks, make
from tests.engine.support.graph_workloads import greedy_request
from tests.engine.support.operations_seen import FOR_THE_HOST, Operations
from tests.engine.support.oracle import VOCAB, save_tiny
from tests.engine.support.recorded_graphs import Recording
from tests.engine.support.runner_parts import graphs_of_gpus, with_our_kernels
from tests.engine.support.sampling_rows import row_params

CPU = torch.device("cpu")


_BLOCKS = FP8_BLOCKS | {"weight_block_size": [128, 128]}
_IN_BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda path: save_tiny("qwen3", path, num_hidden_layers=1),
    "latent KV": lambda path: save_tiny("deepseek_v3", path, num_hidden_layers=2),
    "heads of two sizes, experts next to an MLP": lambda path: save_tiny(
        "gemma4_moe", path, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    ),
    "experts in int4": lambda path: make(path, awq, AWQ, "mixtral", num_hidden_layers=1).quantized,
    "experts in fp8": lambda path: (
        make(path, partial(fp8_blocks, size=128), _BLOCKS, "mixtral", num_hidden_layers=1, **_IN_BLOCKS).quantized
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
def test_a_question_after_a_long_prefix_is_rows_that_share_it(tmp_path: Path) -> None:
    """Beside a decode and a prompt, which share nothing, in one graph."""
    config = EngineConfig(
        str(save_tiny("qwen3", tmp_path, num_hidden_layers=1, max_position_embeddings=640)),
        device="cpu",
        attention="reference",
        page_size=16,
        kv_pages=60,
        max_model_len=640,
        threads=1,
    )
    plain, runner = load_model(config), with_our_kernels(load_model(config))
    recording = Recording()
    runner.add_token_graphs(3, 32, (), recording)
    decode, short = greedy_request("d", 6), greedy_request("s", 7)
    long = greedy_request("l", 600)
    long.tokens[:] = [token % VOCAB for token in long.tokens]
    pages = list(range(2, 40))
    plain.run(StepPlan((Chunk(long, 0, 590, long.tokens[:590], pages, samples=False),)))
    plain.run(StepPlan((Chunk(decode, 0, 5, decode.tokens[:5], [0], samples=False),)))
    runner.pages.data[:, :, :60] = plain.pages.data[:, :, :60]
    chunks = (
        Chunk(decode, 5, 1, decode.tokens[5:], [0], samples=True),
        Chunk(short, 0, 7, short.tokens, [1], samples=True),
        Chunk(long, 590, 10, long.tokens[590:], pages, samples=True),
    )
    expected = plain.run(StepPlan(chunks)).token_ids
    seen: list[list[int]] = []
    find = RowGroups.find

    def noting(groups: RowGroups, *rows: torch.Tensor) -> None:
        find(groups, *rows)
        seen.append((groups.tiles * TILE.value).tolist())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowGroups, "find", noting)
        for _ in range(2):
            result = runner.run(StepPlan(chunks))
            assert result.token_ids == expected
    assert result.is_replayed and recording.num_cuts == 0
    assert len(seen) == 2 and seen[0] == [0] * 8 + [576] * 10 + [0] * 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
@pytest.mark.parametrize("kind", MODELS)
def test_steps_of_our_kernels_give_the_tokens_of_plain_torch(kind: str, tmp_path: Path) -> None:
    """Three requests' tokens stay on the device; one request leaves, and another takes its row."""
    model = MODELS[kind](tmp_path)
    config = EngineConfig(
        str(model), device="cpu", attention="reference", page_size=4, kv_pages=24, max_model_len=32, threads=1
    )
    plain, runner = load_model(config), with_our_kernels(load_model(config))
    recording = Recording()
    with graphs_of_gpus():
        runner.add_graphs(3, recording)

    rows = [greedy_request(f"r{i}", 5 + i, temperature=0.8 * (i % 2)) for i in range(4)]
    pages = [list(range(6 * i, 6 * i + 6)) for i in range(4)]
    for i, row in enumerate(rows):  # The KV of prompts does not matter here, except for their last tokens.
        chunk = Chunk(row, 0, row.num_tokens - 1, row.tokens[:-1], pages[i], samples=False)
        plain.run(StepPlan((chunk,)))
    runner.pages.data[:, :, :24] = plain.pages.data[:, :, :24]
    expected: list[list[int]] = []
    got: list[list[int]] = []
    for step, members in enumerate([(0, 1, 2), (0, 1, 2), (2, 1, 3), (2, 1, 3), (3,)]):
        chunks = [
            Chunk(rows[i], n := rows[i].num_tokens - 1, 1, rows[i].tokens[n:], pages[i], True) for i in members
        ]
        pending = [
            Chunk(c.request, c.start, 1, [PENDING] if c.request.num_output else c.token_ids, c.pages, True)
            for c in chunks
        ]
        with Operations() as operations:
            got.append(list(runner.run(StepPlan(tuple(pending))).token_ids))
        assert not operations.seen & FOR_THE_HOST
        expected.append(list(plain.run(StepPlan(tuple(chunks))).token_ids))
        assert got == expected, f"step {step}"
        for i, token in zip(members, expected[-1], strict=True):
            rows[i].tokens.append(token)
    assert recording.num_replayed == 2 * 3, "the forward pass, and sampling"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
def test_drafts_that_our_kernels_continue_are_those_of_plain_torch(tmp_path: Path) -> None:
    """Three rows of a graph of four: greedy, drawn, and drawn from the likeliest. The host is not asked."""
    config = EngineConfig(
        str(MODELS["plain"](tmp_path)), device="cpu", attention="reference", page_size=4, kv_pages=24, threads=1
    )
    plain, runner = load_model(config), with_our_kernels(load_model(config))
    with graphs_of_gpus():
        chains = runner.chain_graphs([ChainSize(4, 1), ChainSize(4, 3)], Recording())
    drafters = DraftModel(plain, ()), DraftModel(runner, (), chains=chains)
    asked: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9})
    requests = [greedy_request(f"r{i}", 5 + i, **params) for i, params in enumerate(asked)]
    for _ in range(2):
        expected = drafters[0].propose(requests, [4, 4, 2])
        with Operations() as operations:
            assert drafters[1].propose(requests, [4, 4, 2]) == expected
        assert not operations.seen & FOR_THE_HOST
        for one, draft in zip(requests, expected, strict=True):
            one.tokens += [*draft, 50]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
@pytest.mark.parametrize("cuts", [False, True])
def test_sampling_in_a_graph_is_a_few_launches_and_fills_nothing(
    cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(sample, "launch", lambda kernel, *_, **__: launched.append(kernel.fn.__name__))
    choose = triton_graph_chooser()
    positions = torch.zeros(3, dtype=torch.int64)
    logits, params = torch.zeros(3, 70), row_params(positions, [1.0] * 3)
    with Operations() as operations:
        choose(logits, params, positions, cuts=cuts)
    of_cuts = ["find_bounds", "narrow", "narrow", "collect", "find_cuts", "_weigh"]
    assert launched == ["_best", "_weigh", *(of_cuts if cuts else []), "_draw"]
    assert operations.seen <= {"aten.empty.memory_format"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and do not run on a CPU")
def test_both_graph_choosers_choose_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 70, generator=generator) * 3
    logits[3, 5] = torch.inf
    seeds = torch.tensor([3, -(2**60), 8, 1])
    positions = torch.tensor([0, 1, 700, 3])
    for asked in ([], [0, 5, 9, 0], [0, 0, 60, 3]):
        params = row_params(seeds, [0.0, 1.0, 0.3, 1.0], asked)
        expected = torch_graph_chooser(logits.clone(), params, positions, cuts=bool(asked))
        found = triton_graph_chooser()(logits, params, positions, cuts=bool(asked))
        assert found.tolist() == expected.tolist()
        assert expected[3] == -1
