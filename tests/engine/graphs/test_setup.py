"""When graphs are used, how much memory is reserved for them, and devices that cannot record them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu_sections.shapes import MODELS
from engine.attention.base import AttentionBackend
from engine.graphs import setup
from engine.graphs.chain_graphs import ChainSize
from engine.graphs.draft_graphs import draft_sizes
from engine.graphs.row_assignment import TABLE
from engine.graphs.setup import (
    capture_all,
    draft_chains,
    draft_widths,
    graph_bytes,
    piece_tokens,
    why_none,
    why_not,
)
from engine.graphs.step_graphs import StepGraphs
from engine.model_config.config import ModelConfig
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from tests.engine.support.oracle import save_tiny

GPU, CPU = torch.device("cuda"), torch.device("cpu")
MIB = 2**20


def backend(*, is_capturable: bool) -> AttentionBackend:
    return cast(AttentionBackend, SimpleNamespace(name="some", is_capturable=is_capturable))


def test_why_not_says_the_reason() -> None:
    triton, planned = backend(is_capturable=True), backend(is_capturable=False)
    assert why_not(EngineConfig(), triton, GPU) is None
    assert why_not(EngineConfig(cuda_graphs="lazy"), triton, GPU) is None
    for reason, given in (
        ("cuda_graphs is off", (EngineConfig(cuda_graphs="off"), triton, GPU)),
        ("for GPUs, not for cpu", (EngineConfig(), triton, CPU)),
        ("attention by some needs the host", (EngineConfig(), planned, GPU)),
    ):
        assert reason in (why_not(*given) or "")


def test_all_steps_of_recurrent_models_are_counted(tmp_path: Path) -> None:
    facts = ModelConfig.from_directory(save_tiny("qwen3_5", tmp_path))
    plain, drafting = EngineConfig(max_running=8), EngineConfig(max_running=8, speculation=Speculation())
    assert graph_bytes(plain, facts, 2, 512) < graph_bytes(drafting, facts, 2, 512)
    assert piece_tokens(plain, facts) == 2048
    none, few = (replace(plain, graph_tokens=tokens) for tokens in (0, 512))
    assert graph_bytes(none, facts, 2, 512) < graph_bytes(few, facts, 2, 512) < graph_bytes(plain, facts, 2, 512)
    spreading = graph_bytes(plain, facts, 2, 512, spreads_prompts=True)
    assert spreading == graph_bytes(plain, facts, 2, 512), "a row for each token would have states of its own"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match='"start", "lazy" or "off", got \'sometimes\''):
        EngineConfig(cuda_graphs=cast(Any, "sometimes"))


def test_more_rows_and_longer_requests_take_more_memory(model: Any) -> None:
    facts = ModelConfig.from_directory(model)
    few, many = EngineConfig(max_running=8), EngineConfig(max_running=256)
    assert 64 * MIB < graph_bytes(few, facts, 2, 512) < graph_bytes(many, facts, 2, 512) < 1024 * MIB
    tables = graph_bytes(many, facts, 2, 512 + 160_000) - graph_bytes(many, facts, 2, 512)
    assert tables == 256 * 4 * 10_000, "a word for each page of each row"
    grouped = [graph_bytes(many, facts, 2, length, num_groups=7) for length in (512, 512 + 160_000)]
    assert grouped[1] - grouped[0] == 7 * tables


def test_graphs_of_drafts_and_of_pieces_are_counted(model: Any) -> None:
    facts = ModelConfig.from_directory(model)

    def taken(**settings: Any) -> int:
        return graph_bytes(EngineConfig(max_running=8, **settings), facts, 2, 512)

    decodes = taken(graph_tokens=0)
    assert decodes < taken(graph_tokens=64) < taken(graph_tokens=512) < taken(graph_tokens=2048)
    assert taken(graph_tokens=512) == taken(graph_tokens=2048, max_step_tokens=512), "steps are no larger"
    spread = graph_bytes(EngineConfig(max_running=8), facts, 2, 512, spreads_prompts=True)
    assert decodes < spread != taken(graph_tokens=512)
    assert graph_bytes(EngineConfig(max_running=8, graph_tokens=0), facts, 2, 512, spreads_prompts=True) == decodes
    assert decodes < taken(graph_tokens=0, speculation=Speculation(max_drafts=1))
    few, many = (EngineConfig(speculation=Speculation(max_drafts=n)) for n in (1, 4))
    assert (draft_widths(EngineConfig()), draft_widths(few), draft_widths(many)) == ((), (2,), (2, 5))
    assert draft_widths(many, is_draft_model=True) == (1, 2, 5)


def test_graphs_that_continue_drafts_are_counted_by_their_calls(model: Any) -> None:
    facts = ModelConfig.from_directory(model)
    capturable, planned = backend(is_capturable=True), backend(is_capturable=False)
    config = EngineConfig(max_running=2, speculation=Speculation(max_drafts=4))
    assert draft_chains(config, capturable) == [(1, 1), (2, 1), (1, 3), (2, 3)]
    assert draft_chains(config, planned) == draft_chains(EngineConfig(), capturable) == []
    few, many = ([ChainSize(2, calls)] for calls in (1, 3))
    taken = [graph_bytes(config, facts, 2, 512, chains=sizes, is_layer=True) for sizes in ([], few, many)]
    kernels = (taken[2] - taken[1]) // 2
    assert taken[1] - taken[0] == kernels + 2 * 4 * (TABLE + 512 // 16), "and the words of two rows"
    num_graphs = len(draft_sizes(draft_widths(config), 2))
    alone = graph_bytes(replace(config, speculation=None), facts, 2, 512, is_layer=True)
    assert taken[0] - alone > num_graphs * kernels > 0, "a layer's first call has graphs, too"
    draft = [graph_bytes(config, facts, 2, 512, is_draft_model=True, chains=sizes) for sizes in (few, many)]
    assert draft[1] - draft[0] == 2 * kernels and draft[0] > taken[1]


def test_small_models_have_graphs_of_longer_prompts(tmp_path: Path) -> None:
    """An 8B takes an H100 so long for 512 tokens that the host has launched what follows; a 0.6B for no prompt."""
    chosen = {}
    large = MODELS["llama-3.1-8b"] | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
    for name, raw in {**MODELS, "70b": large}.items():
        (tmp_path / "config.json").write_text(json.dumps(raw))
        facts = ModelConfig.from_directory(tmp_path)
        chosen[name] = piece_tokens(EngineConfig(max_step_tokens=8192), facts)
        assert piece_tokens(EngineConfig(graph_tokens=64), facts) == 64
        assert piece_tokens(EngineConfig(max_step_tokens=300), facts) == 300
    latent = ModelConfig.from_directory(save_tiny("deepseek_v3", tmp_path / "latent"))
    assert piece_tokens(EngineConfig(graph_tokens=2048), latent) == 512, "longer rows are not absorbed"
    assert chosen == {"qwen3-0.6b": 2048, "llama-3.1-8b": 512, "qwen3-14b": 512, "70b": 512}


def test_each_kind_of_heads_has_memory_for_its_queries(tmp_path: Path) -> None:
    facts, config = ModelConfig.from_directory(save_tiny("gemma4", tmp_path)), EngineConfig(max_running=8)
    kinds = [kind for kind, _ in facts.kinds_of_heads.values()]
    assert len(kinds) == 2
    for kind in kinds:
        alike = replace(facts, layers=tuple(replace(layer, attention=kind) for layer in facts.layers))
        assert list(alike.kinds_of_heads) == [kind.kv_shape]
        assert graph_bytes(config, facts, 2, 512) > graph_bytes(config, alike, 2, 512)


def test_the_memory_of_experts_kernels_and_of_their_results_is_counted(tmp_path: Path) -> None:
    facts, config = ModelConfig.from_directory(save_tiny("mixtral", tmp_path)), EngineConfig(max_running=8)
    assert facts.experts is not None
    few = replace(facts, experts=replace(facts.experts, per_token=1))
    wider = graph_bytes(config, facts, 2, 512) - graph_bytes(config, few, 2, 512)
    assert wider == piece_tokens(config, facts) * (facts.experts.intermediate_size + facts.hidden_size) * 2
    assert graph_bytes(config, facts, 2, 512) - wider > graph_bytes(config, replace(facts, experts=None), 2, 512)


def test_attention_that_needs_the_host_is_left_out_of_graphs_in_pieces() -> None:
    assert why_not(EngineConfig(), backend(is_capturable=False), GPU) is not None
    assert why_none(EngineConfig(), GPU) is None
    assert "for GPUs" in (why_none(EngineConfig(), CPU) or "")


class Two:
    """Two graphs, which are recorded or not."""

    num_graphs = 2

    def __init__(self, error: Exception | None) -> None:
        def capture(work: Any) -> Any:
            if error is not None:
                raise error
            return work

        graphs = StepGraphs([1, 2], lambda size: None, capture)
        self.run, self.capture_all = graphs.run, graphs.capture_all


def test_the_memory_taken_is_logged_next_to_the_expected_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([(900 * MIB, 0), (893 * MIB, 0)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: next(free))
    with caplog.at_level("INFO", setup.__name__):
        capture_all([Two(None)], GPU, 64 * MIB)
    assert "2 CUDA graphs took 7 MiB, 64 MiB were expected" in caplog.text


def test_a_device_that_cannot_record_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It computes all sizes all the same, as other ranks do, and says so once."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900 * MIB, 0))
    refusing = Two(RuntimeError("operation not permitted when stream is capturing"))
    capture_all([refusing], GPU, 0)
    assert not refusing.run(1) and not refusing.run(2)
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "without a CUDA graph" in warning.getMessage() and "not permitted" in warning.getMessage()
    with pytest.raises(ValueError, match="900 MiB of GPU memory were free for 2 of them, 64 MiB were expected"):
        capture_all([Two(torch.OutOfMemoryError("out of memory"))], GPU, 64 * MIB)
