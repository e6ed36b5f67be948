"""Preparing a step for a GPU reads nothing back from it: packages' host-side arguments come from host data."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from engine.attention.flash_attn import FlashAttention
from engine.attention.flash_packages import PACKAGES
from engine.attention.flashinfer import FlashInferAttention
from tests.engine.support.attention_on_devices import batch_on
from tests.engine.support.paged_kv import Heads, Paged

META = torch.device("meta")  # tensors without numbers: to read one is an error


@pytest.mark.parametrize("package", [*(package.module for package in PACKAGES), "flashinfer"])
@pytest.mark.parametrize(
    "rows", [[(5, 1), (31, 1)], [(0, 9)], [(40, 1), (0, 3)]], ids=["decodes", "prefill", "mixed"]
)
def test_preparing_reads_nothing_from_the_device(
    install: Callable[[str], ModuleType], package: str, rows: list[tuple[int, int]]
) -> None:
    install(package)
    case = Paged(rows, Heads(2, 1, 64), 256, None, torch.bfloat16)
    backend = FlashInferAttention(case.shape) if package == "flashinfer" else FlashAttention(case.shape)
    step = backend.prepare(batch_on(META, case.batch), case.pages.null_page)
    assert step.batch.kv_lens_host == [start + n for start, n in rows]
