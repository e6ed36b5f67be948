"""Fixtures that pretend there is a GPU, and that install doubles of the optional attention packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tests.engine.support.attention_packages import flash_module, flashinfer_module

PACKAGES = ("flash_attn_interface", "vllm.vllm_flash_attn", "vllm_flash_attn", "flash_attn", "flashinfer")

Install = Callable[[str], ModuleType]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend that there is a GPU of the given compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return pretend


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, gpu: Callable[[tuple[int, int]], None]) -> Install:
    """Pretend that there is a Hopper GPU and no optional package; the function installs a package's double."""
    gpu((9, 0))
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)

    def put(name: str) -> ModuleType:
        module = flashinfer_module() if name == "flashinfer" else flash_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put
