"""Ranks with the same key-value heads that divide the KV of each request give the tokens that one rank gives.

`test_ranks.py` and `test_files_on_ranks.py` run such ranks through preemption, drafts, beams, files and the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from engine.loading.check_model import check_model
from engine.values.sampling_params import SamplingParams
from tests.engine.support.engines_on_ranks import PROMPTS, Layout, ranks_config, run_on_ranks, tokens_of_each
from tests.engine.support.oracle import Tiny, random_ids, tiny_models

LATENT, HYBRID = "deepseek_v3", "qwen3_next"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    def shape(family: str) -> dict[str, int]:
        if family == "qwen3_next":  # It has keys and values in each fourth layer.
            return {"num_key_value_heads": 1, "num_hidden_layers": 4}
        heads = {"qwen3": 2, LATENT: 8}.get(family, 1)
        return {"num_attention_heads": 8, "num_key_value_heads": heads, "num_hidden_layers": 2}

    return tiny_models(tmp_path_factory, shape)


@pytest.fixture(scope="module")
def on_one_rank(tiny: Tiny) -> Callable[[str], list[list[int]]]:
    """The greedy tokens of a family's model on one rank."""
    return cache(lambda family: tokens_of_each(run_on_ranks(tiny(family), 1, PROMPTS)[0]))


@pytest.mark.parametrize("ring_tokens", [1, 1024], ids=["ring", "asked"])
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mqa", Layout(2, parts=2)),
        ("mqa", Layout(4, parts=4)),
        ("mqa", Layout(4, parts=2)),
        ("qwen3", Layout(4, parts=2)),
        ("qwen3", Layout(4, stages=2, parts=2)),
        ("mixtral", Layout(2, parts=2)),
        (LATENT, Layout(4, parts=4)),
        (HYBRID, Layout(2, parts=2)),
    ],
    ids=str,
)
def test_parts_of_kv_give_the_tokens_of_the_whole(
    tiny: Tiny, on_one_rank: Callable[[str], list[list[int]]], family: str, layout: Layout, ring_tokens: int
) -> None:
    """Prompts are longer than a step, and steps mix them with decodes. Earlier KV goes round the ranks, or each
    rank is asked for attention to its part.
    """
    shared, _ = run_on_ranks(tiny(family), layout, PROMPTS, ring_attention_tokens=ring_tokens)
    assert tokens_of_each(shared) == on_one_rank(family)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_parts_of_small_and_of_large_pages(tiny: Tiny, page_size: int) -> None:
    """Four ranks have 64 positions each of a page of 256: short requests have all theirs on the first ranks."""
    prompts = [random_ids(seed, length) for seed, length in enumerate((1, 5, 70, 200))]
    alone, _ = run_on_ranks(tiny("mqa"), 1, prompts)
    sizes: dict[str, Any] = {"page_size": page_size, "kv_pages": 256 // page_size, "ring_attention_tokens": 20}
    shared, _ = run_on_ranks(tiny("mqa"), Layout(4, parts=4), prompts, **sizes)
    assert tokens_of_each(shared) == tokens_of_each(alone)


def test_a_rank_has_memory_for_its_part_only(tiny: Tiny) -> None:
    settings: dict[str, Any] = {
        "kv_pages": None,
        "kv_memory_share": 1e-4,
        "max_running": 256,
        "max_step_tokens": 256,
    }
    _, whole = run_on_ranks(tiny("mqa"), 4, PROMPTS[:1], **settings)
    _, parts = run_on_ranks(tiny("mqa"), Layout(4, parts=4), PROMPTS[:1], **settings)
    assert parts.cache.num_pages == pytest.approx(whole.cache.num_pages, rel=0.1)
    assert parts.cache.page_size == 4 * whole.cache.page_size


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("qwen3", {"context_parallel_size": 4}, "context_parallel_size is 4, but .* head is 2 .* can be 1, 2"),
        (
            "gpt_oss",
            {"context_parallel_size": 4},
            "context_parallel_size is 4, but layers .* a window",
        ),
        ("mqa", {"context_parallel_size": 4, "attention": "native"}, "native cannot run on cpu: .* the sums"),
    ],
)
def test_what_cannot_be_divided_is_refused(tiny: Tiny, family: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_on_ranks(tiny(family), 4, PROMPTS[:1], **settings)


def test_a_check_refuses_what_the_start_refuses(tiny: Tiny) -> None:
    config = ranks_config(tiny("qwen3"), Layout(4, parts=4))
    with pytest.raises(ValueError, match="context_parallel_size is 4, but"):
        check_model(config)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["mqa", HYBRID])
def test_preempted_requests_continue_with_the_same_tokens(tiny: Tiny, family: str, preemption: str) -> None:
    """Memory holds about two of six requests: every rank swaps its part of their KV out and in."""
    prompts = [random_ids(20 + index, 25 + index) for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20)
    sizes: dict[str, Any] = {"kv_pages": 14, "page_size": 4, "max_running": 6, "host_kv_gib": 2**-6}
    sizes["preemption"] = preemption
    alone, _ = run_on_ranks(tiny(family), 1, prompts, params)
    shared, engine = run_on_ranks(tiny(family), Layout(2, parts=2), prompts, params, **sizes)
    assert tokens_of_each(shared) == tokens_of_each(alone)
    load = engine.loop.load()
    assert load.num_preemptions > 0
    assert (load.num_swapped > 0) == (preemption == "swap")
