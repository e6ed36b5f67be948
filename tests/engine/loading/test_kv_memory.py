"""How many pages memory and settings allow."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.loading.kv_memory import (
    _container_ram,
    _machine_ram,
    available_ram,
    check_room,
    host_pages_for,
    pages_for,
)
from engine.loading.step_memory import measure_step
from engine.model_config.config import ModelConfig
from engine.program.engine import Engine
from engine.settings.config import EngineConfig
from engine.values.plan import Runner, StepPlan
from tests.engine.support.oracle import save_tiny

MIB = 2**20


def test_pages_fill_the_stated_share_of_free_memory() -> None:
    config = EngineConfig(kv_memory_share=0.5, page_size=16)
    assert pages_for(config, 64 * MIB, MIB // 16, max_model_len=4096) == 32


def test_no_more_pages_than_the_largest_batch_can_use() -> None:
    config = EngineConfig(max_running=4, page_size=16)
    assert pages_for(config, 2**40, 1024, max_model_len=100) == 4 * 7


def test_a_page_of_several_ranks_has_the_tokens_of_all_of_them() -> None:
    config = EngineConfig(max_running=4, page_size=16, tensor_parallel_size=3, context_parallel_size=3)
    assert config.page_tokens == 48
    assert pages_for(config, 64 * MIB, MIB // 16, max_model_len=4096) == 16, "memory is that of one rank"
    assert pages_for(config, 2**40, 1024, max_model_len=100) == 4 * 3


def test_stated_pages_are_taken_as_stated() -> None:
    assert pages_for(EngineConfig(kv_pages=12345), 0, 1024, max_model_len=100) == 12345


def test_too_little_memory_is_explained() -> None:
    with pytest.raises(ValueError, match="no memory for KV pages"):
        pages_for(EngineConfig(), MIB, MIB, max_model_len=100)


def test_pages_for_which_the_machine_has_no_memory_are_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=str(save_tiny("llama2", tmp_path)), device="cpu", kv_pages=2**40)
    with pytest.raises(ValueError, match=r"GiB of memory cannot be allocated; lower kv_pages"):
        Engine.from_config(config)


def test_host_pages_take_the_configured_memory_or_none() -> None:
    config = EngineConfig(host_kv_gib=0.5, page_size=16)
    assert host_pages_for(config, MIB // 16, 2**30) == 512
    recomputing = EngineConfig(preemption="recompute", host_kv_gib=0.5)
    assert host_pages_for(recomputing, MIB // 16, 2**30) == 512, "for prefixes"
    assert host_pages_for(EngineConfig(), MIB // 16, 2**30) == 0


def test_host_memory_that_is_not_there_is_explained() -> None:
    with pytest.raises(ValueError, match=r"host_kv_gib is 2, .*1\.0 GiB of RAM"):
        host_pages_for(EngineConfig(host_kv_gib=2.0), 1024, 2**30)
    with pytest.raises(ValueError, match="a page takes"):
        host_pages_for(EngineConfig(host_kv_gib=1e-6), 1024, 2**30)
    with pytest.raises(ValueError, match='preemption is "swap", but host_kv_gib is 0'):
        EngineConfig(preemption="swap")
    with pytest.raises(ValueError, match=r"host_kv_min_uses must be in \[1"):
        EngineConfig(host_kv_min_uses=0)
    with pytest.raises(ValueError, match="host_kv_gib must be in"):
        EngineConfig(host_kv_gib=float("nan"))


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert _container_ram(tmp_path) == 1000 - 700 + 150
    (tmp_path / "memory.max").write_text("max\n")
    assert _container_ram(tmp_path) is None


def test_the_machines_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 10 kB\nMemAvailable:    3 kB\n")
    assert _machine_ram(tmp_path / "meminfo") == 3 * 1024
    assert _machine_ram(tmp_path / "missing") > 0
    assert available_ram() > 0


# --- a GPU that is too small ---------------------------------------------------------------------------------

LLAMA = ModelConfig.from_json(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "max_position_embeddings": 131_072,
        "torch_dtype": "bfloat16",
    },
    {},
    "llama",
)
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "torch_dtype": "bfloat16",
}
GIB = 2**30


def room(gib: float, **settings: Any) -> None:
    config = EngineConfig(**settings)
    check_room(config, LLAMA, 2, LLAMA.kv_bytes_per_token(2), config.max_model_len or 131_072, int(gib * GIB))


def test_a_model_that_fits_is_let_in() -> None:
    room(14.96 + 16)
    room(14.96 + 1, max_model_len=8192)
    room(14.96 + 0.04, kv_pages=16)
    room(8.5 + 16, quantization="fp8")


def test_the_longest_request_that_fits_is_named_and_fits() -> None:
    """14.96 GiB of weights, 128 KiB of KV for each token."""
    said = (
        r"weights take 14\.96 GiB, KV of the longest request, 131,072 tokens, 16\.00 GiB, and 20\.00 GiB of GPU "
        r"memory are free; set max_model_len to at most (\d+) or set quantization to \"fp8\" "
        r"\(weights then take 8\.\d\d GiB\) and max_model_len to at most (\d+)$"
    )
    with pytest.raises(ValueError, match=said) as error:
        room(20)
    found = re.search(said, str(error.value))
    assert found is not None
    plain, rounded = (int(number) for number in found.groups())
    assert plain < rounded
    room(20, max_model_len=plain)
    room(20, max_model_len=rounded, quantization="fp8")
    for longer, quantization in ((plain + 16, None), (rounded + 16, "fp8")):
        with pytest.raises(ValueError, match="does not fit"):
            room(20, max_model_len=longer, quantization=quantization)


def test_gpus_that_share_a_model_need_less_each() -> None:
    config, half = EngineConfig(tensor_parallel_size=2), LLAMA.kv_bytes_per_token(2) // 2
    check_room(config, LLAMA, 2, half, 131_072, int(15.5 * GIB), 2)
    with pytest.raises(ValueError, match=r"weights take 7\.48 GiB.*8\.00 GiB, and 15\.00 GiB"):
        check_room(config, LLAMA, 2, half, 131_072, 15 * GIB, 2)


def test_divided_kv_takes_so_much_less_of_a_gpu() -> None:
    """On 16 GPUs 957 MiB of weights each, and 16 KiB for each token of a key-value head: 2 GiB for the longest."""
    head, whole = LLAMA.kv_bytes_per_token(2) // 8, EngineConfig(device="cuda", tensor_parallel_size=16)
    halves = replace(whole, context_parallel_size=2)
    check_room(halves, LLAMA, 2, head, 131_072, 2 * GIB, 16)
    with pytest.raises(ValueError, match=r"131,072 tokens, 2\.00 GiB, .* max_model_len to at most 69792 "):
        check_room(whole, LLAMA, 2, head, 131_072, 2 * GIB, 16)
    with pytest.raises(ValueError, match=r"131,072 tokens, 1\.00 GiB, .* max_model_len to at most 8512 "):
        check_room(halves, LLAMA, 2, head, 131_072, 1024 * MIB, 16)


def test_copies_of_experts_are_weights_of_each_gpu() -> None:
    """Mixtral-8x7B on two GPUs: 43.50 GiB each, and 10.50 GiB for a copy of an expert in each of 32 layers."""
    mixtral = ModelConfig.from_json(MIXTRAL, {}, "mixtral")
    config = EngineConfig(tensor_parallel_size=2, expert_parallel=True, expert_copies=1, max_model_len=8192)
    assert mixtral.bytes_per_expert(2) == 32 * 3 * 4096 * 14_336 * 2
    half = mixtral.kv_bytes_per_token(2) // 2
    with pytest.raises(ValueError, match=r"weights take 54\.00 GiB.* or lower expert_copies \(10\.50 GiB of"):
        check_room(config, mixtral, 2, half, 8192, 54 * GIB, 2)
    check_room(config, mixtral, 2, half, 8192, 55 * GIB, 2)


def test_the_most_pages_that_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"9000 KV pages 17\.58 GiB.*set kv_pages to at most 2581 or .*fp8"):
        room(20, kv_pages=9000)
    room(20, kv_pages=2581)


def test_only_rounded_weights_are_proposed_when_they_make_all_fit() -> None:
    with pytest.raises(
        ValueError, match=r"12\.00 GiB of GPU memory are free; set quantization to \"fp8\" \([^)]*\)$"
    ):
        room(12, max_model_len=1024)


def test_nothing_is_proposed_where_nothing_helps() -> None:
    for settings in ({}, {"quantization": "fp8"}):
        with pytest.raises(ValueError, match=r"4\.00 GiB of GPU memory are free; use a GPU with more free memory"):
            room(4, **settings)


def test_an_error_for_a_step_that_does_not_fit_names_the_settings_that_make_it_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(_pages: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 15 * GIB)
    with pytest.raises(ValueError, match=r"weights of 15\.00 GiB .*8,192 tokens \(max_model_len\).*2\.00 GiB"):
        measure_step(EngineConfig(), 8192, no_room, torch.device("cuda"))


@pytest.mark.parametrize(("allocated", "reserved", "left"), [(3, 2, 50), (3, 7, 46)])
def test_a_step_counts_the_memory_that_the_allocator_took_for_it(
    monkeypatch: pytest.MonkeyPatch, allocated: int, reserved: int, left: int
) -> None:
    """Weights take 15 GiB and the pages 2; `allocated` and `reserved` are what a step adds to each at its peak."""
    now = iter((15, 17))

    class OneStep:
        def prepare(self, plan: StepPlan) -> Callable[[], None]:
            return lambda: None

    for name, value in (
        ("memory_allocated", lambda _device: next(now) * GIB),
        ("memory_reserved", lambda _device: 18 * GIB),
        ("reset_peak_memory_stats", lambda _device: None),
        ("synchronize", lambda _device: None),
        ("empty_cache", lambda: None),
        ("max_memory_allocated", lambda _device: (17 + allocated) * GIB),
        ("max_memory_reserved", lambda _device: (18 + reserved) * GIB),
        ("mem_get_info", lambda _device: (53 * GIB, 80 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    steps = cast(Callable[[int], Runner], lambda _pages: OneStep())
    assert measure_step(EngineConfig(), 8192, steps, torch.device("cuda")) == left * GIB
