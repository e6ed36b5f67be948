"""A kernel is launched on the device of its tensors, without Triton's search if it can be, or only compiled."""

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
import triton.language as tl
from triton.compiler import CompiledKernel
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


def test_kernels_run_on_the_tensors_device_whatever_the_threads_is(kernel: Launches) -> None:
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

    def let_others_run(phase: str, info: dict[str, int]) -> None:
        time.sleep(0.0001)

    thresholds = gc.get_threshold()
    gc.callbacks.append(let_others_run)
    gc.set_threshold(5)
    yield
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(let_others_run)


def test_compilers_that_parse_at_the_same_time_do_not_disturb_each_other(
    threads_change_in_collections: None,
) -> None:
    kernels, together = [JITFunction(some_kernel) for _ in range(4)], threading.Barrier(4)

    def parse(kernel: Any) -> None:
        together.wait(60)
        for _ in range(5):
            assert kernel.parse().body[0].name == "some_kernel"

    with compiling(), ThreadPoolExecutor(len(kernels)) as compilers:
        list(compilers.map(parse, kernels))


def with_constants(x: Any, size: Any, scale: Any, FIRST: tl.constexpr, SECOND: tl.constexpr) -> None:
    """A kernel of which only the signature matters."""


class Variant(CompiledKernel):
    """What Triton would have compiled; it notes how it is launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launched.append((grid, *args))


def test_a_variant_that_triton_has_found_before_is_launched_without_its_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Variant] = []

    def run(*_: Any, **__: Any) -> Variant:
        found.append(Variant())
        return found[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    kernel, x = JITFunction(with_constants), torch.zeros(64)

    def launched(*args: Any, first: int = 1, grid: tuple[int, ...] = (3,)) -> bool:
        """Whether Triton was asked."""
        before = len(found)
        launch(kernel, grid, *args, SECOND=2, FIRST=first, num_warps=4)
        return len(found) > before

    assert launched(x, 5, 0.5)
    assert not launched(x[4:], 7, 2.0, grid=(4, 5))
    [variant] = found
    [(grid, tensor, *others)] = variant.launched
    assert grid == (4, 5, 1) and tensor.data_ptr() == x[4:].data_ptr() and others == [7, 2.0, 1, 2]
    other: list[tuple[Any, ...]] = [
        (x, 1, 0.5),
        (x, 48, 0.5),
        (x, 2**31, 0.5),
        (x[1:], 5, 0.5),
        (x.half(), 5, 0.5),
    ]
    for args in [*other, (x, None, 0.5)]:
        assert launched(*args), f"Triton compiles {args} by itself"
        assert not launched(*args)
    assert launched(x, 5, 0.5, first=7) and not launched(x, 9, 0.5, first=7)
    assert len(variant.launched) == 1


def plain(x: Any, SIZE: tl.constexpr, other: Any) -> None:
    """A kernel whose constant is not its last argument."""


def test_arguments_that_only_triton_knows_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(*args: Any, **_: Any) -> Variant:
        asked.append(args)
        return Variant()

    monkeypatch.setattr(JITFunction, "run", run)
    x, box = torch.zeros(4), SimpleNamespace(descriptor="of a box")
    for _ in range(2):
        launch(JITFunction(with_constants), (1,), x, 5, box, FIRST=1, SECOND=2)
    kernel = JITFunction(plain)
    for size in (3, 5):
        launch(kernel, (1,), x, size, 9)
    assert len(asked) == 4
