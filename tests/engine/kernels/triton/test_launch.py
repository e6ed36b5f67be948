"""A kernel is launched on the device of its tensors, and within `compiling` it is only compiled."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from engine.kernels.triton.launch import compiling, launch


class Launches:
    """A kernel that notes the device on which it was launched, and whether it would only compile."""

    def __init__(self) -> None:
        self.current = 0
        self.seen: list[tuple[int, bool]] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool) -> None:
        self.seen.append((self.current, warmup))

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before


def tensor_on(index: int) -> torch.Tensor:
    return cast(torch.Tensor, SimpleNamespace(device=SimpleNamespace(type="cuda", index=index)))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kernel = Launches()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: kernel.current)
    monkeypatch.setattr(torch.cuda, "device", kernel.on)
    return kernel


def test_on_the_tensors_device_whatever_the_threads_is(kernel: Launches) -> None:
    for index in (0, 1, 0):
        launch(kernel, (1,), tensor_on(index), 5)
    assert kernel.seen == [(0, False), (1, False), (0, False)]
    assert kernel.current == 0


def test_compiled_only_until_the_end(kernel: Launches) -> None:
    with pytest.raises(ZeroDivisionError), compiling():
        launch(kernel, (1,), tensor_on(1))
        launch(kernel, (1,), tensor_on(1) and torch.zeros(1))
        raise ZeroDivisionError
    launch(kernel, (1,), tensor_on(0))
    assert [is_compiled for _, is_compiled in kernel.seen] == [True, True, False]


def some_kernel(a: Any, b: Any) -> None:
    for _ in range(3):
        if a < b:
            a += b * (a - (b + (a * b)))


@pytest.fixture
def threads_change_in_collections() -> Iterator[None]:
    """Python collects garbage all the time, and another thread goes on meanwhile."""

    def let_others_go_on(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.0001)

    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_go_on)
    gc.set_threshold(5)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(let_others_go_on)


def test_compilers_that_parse_beside_each_other_do_not_disturb_each_other(
    threads_change_in_collections: None,
) -> None:
    kernels, together = [JITFunction(some_kernel) for _ in range(4)], threading.Barrier(4)

    def parse(kernel: Any) -> None:
        together.wait(60)
        for _ in range(5):
            assert kernel.parse().body[0].name == "some_kernel"

    with compiling(), ThreadPoolExecutor(len(kernels)) as compilers:
        list(compilers.map(parse, kernels))
