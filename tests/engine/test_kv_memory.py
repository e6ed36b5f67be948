"""How many pages memory and settings allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.kv_memory import _container_ram, _machine_ram, available_ram, host_pages_for, pages_for

MIB = 2**20


def test_pages_fill_the_stated_share_of_free_memory() -> None:
    config = EngineConfig(kv_memory_share=0.5, page_size=16)
    assert pages_for(config, 64 * MIB, MIB // 16, max_model_len=4096) == 32


def test_no_more_pages_than_the_largest_batch_can_use() -> None:
    config = EngineConfig(max_running=4, page_size=16)
    assert pages_for(config, 2**40, 1024, max_model_len=100) == 4 * 7


def test_stated_pages_are_taken_as_stated() -> None:
    assert pages_for(EngineConfig(kv_pages=12345), 0, 1024, max_model_len=100) == 12345


def test_too_little_memory_is_explained() -> None:
    with pytest.raises(ValueError, match="no memory for KV pages"):
        pages_for(EngineConfig(), MIB, MIB, max_model_len=100)


def test_host_pages_are_what_was_asked_for_or_none() -> None:
    config = EngineConfig(host_kv_gib=0.5, page_size=16)
    assert host_pages_for(config, MIB // 16, 2**30) == 512
    assert host_pages_for(EngineConfig(preemption="recompute", host_kv_gib=0.5), MIB // 16, 0) == 0
    assert host_pages_for(EngineConfig(), MIB // 16, 2**30) == 0


def test_host_memory_that_is_not_there_is_explained() -> None:
    with pytest.raises(ValueError, match=r"host_kv_gib is 2, .*1\.0 GiB of RAM"):
        host_pages_for(EngineConfig(host_kv_gib=2.0), 1024, 2**30)
    with pytest.raises(ValueError, match="a page takes"):
        host_pages_for(EngineConfig(host_kv_gib=1e-6), 1024, 2**30)
    with pytest.raises(ValueError, match='preemption is "swap", but host_kv_gib is 0'):
        EngineConfig(preemption="swap")
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
