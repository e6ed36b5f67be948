"""A kernel is launched on the device of its tensors, and within `compiling` it is only compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")
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
