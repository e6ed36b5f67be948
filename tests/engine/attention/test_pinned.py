"""Steps copy between host and device through pinned memory alone."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.pinned import Packed, on_device, on_host, pin, to_device
from tests.engine.support.counted_copies import META, CountedCopies

ENGINE = Path(__file__).parents[3] / "engine"
ROOMS = ("attention", "drafting", "graphs", "runner", "sampling", "ranks")
ELSEWHERE = {
    "attention/pinned.py": "it is the one place",
    "graphs/step_inputs.py": "when graphs are made",
    "sampling/adjust.py": "the reference, for GPUs without Triton",
    "sampling/chooser.py": "the reference, for GPUs without Triton",
    "sampling/distribution.py": "the reference, for GPUs without Triton",
}
"""Files with other copies, and why these are in no step."""


def copies_in(source: str) -> list[str]:
    """Return the calls that copy from one device to another in whatever memory: `x.to(device)`, `x.cpu()`,
    `x.cuda()` and `torch.tensor(x, device=device)`.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, words = node.func.attr, [keyword.arg for keyword in node.keywords]
        arguments = [ast.unparse(argument) for argument in node.args]
        is_sent = name == "to" and any(text.split(".")[-1] == "device" or "logits" in text for text in arguments)
        is_made = name in ("tensor", "as_tensor") and "device" in words
        if is_sent or is_made or name in ("cpu", "cuda"):
            found.append(ast.unparse(node))
    return found


def test_no_step_copies_from_pageable_memory() -> None:
    seen: Counter[str] = Counter()
    for room in ROOMS:
        for path in sorted((ENGINE / room).glob("*.py")):
            name = f"{room}/{path.name}"
            copies = copies_in(path.read_text())
            seen[name] += len(copies)
            assert not copies or name in ELSEWHERE, f"{name}: {copies}: use engine.attention.pinned"
    assert all(seen[name] for name in ELSEWHERE), "the list names no file without such copies"


@pytest.mark.parametrize("line", ["x.to(device)", "x.to(y.device, z)", "x.cpu()", "torch.tensor(x, device=d)"])
def test_such_copies_are_found(line: str) -> None:
    assert copies_in(line) == [line]
    assert not copies_in("x.to(torch.float32) + on_device(x, device)")


def test_nothing_is_copied_on_a_cpu() -> None:
    numbers = np.arange(3)
    there = on_device(numbers, torch.device("cpu"))
    numbers[1] = 7
    assert there.tolist() == [0, 7, 2] and on_host(there) is there
    both = Pair(there, Pair(there, 3))
    assert to_device(both, torch.device("cpu")) is both


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from([np.int32, np.int64, np.float64, np.uint8]),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
        st.booleans(),
    ),
    max_size=9,
)


@given(ARRAYS)
def test_tensors_that_are_sent_together_keep_their_values(wanted: list[tuple[Any, list[int], bool]]) -> None:
    """Of any shapes and types, empty and transposed ones too. Each begins where a separate tensor could."""
    parts = []
    for kind, shape, is_turned in wanted:
        numbers = torch.from_numpy(np.arange(np.prod(shape, dtype=int)).astype(kind).reshape(shape))
        parts.append(numbers.T if is_turned and numbers.dim() == 2 else numbers)
    packed = Packed.of(parts, is_pinned=False)
    there = packed.words.clone()
    views = packed.views(there)
    for part, view in zip(parts, views, strict=True):
        assert view.dtype == part.dtype and view.is_contiguous() and torch.equal(view, part)
        assert (view.data_ptr() - there.data_ptr()) % 16 == 0 or not view.numel()
    for number, view in enumerate(views):
        view.fill_(number)
    for number, view in enumerate(views):
        assert (view == number).all(), "no two of them overlap"


def test_the_tensors_of_nested_dataclasses_are_sent_in_one_copy() -> None:
    long, short = torch.arange(6).view(2, 3), torch.arange(5, dtype=torch.int32)
    with CountedCopies() as copies:
        there = to_device(Pair(long, Pair(short, [long])), META)
    assert copies.sizes == [48 + 32]
    for found, sent in ((there.first, long), (there.second.first, short)):
        assert found.device.type == "meta" and (found.shape, found.dtype) == (sent.shape, sent.dtype)
    assert there.second.second == [long], "of other values nothing is sent"


class Registered:
    """A double of CUDA's runtime: what is pinned now, by address."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.sizes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        if not self.error:
            self.sizes[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.sizes[address]


class Owner:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        pin(self.memory, self)


def test_exactly_the_memory_asked_for_is_pinned_until_its_owner_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own allocator would take 8 MiB here."""
    cuda = Registered()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    owner = Owner(5 * 2**20)
    assert cuda.sizes == {owner.memory.data_ptr(): 5 * 2**20}
    del owner
    assert not cuda.sizes


def test_the_error_of_memory_that_cannot_be_pinned_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Registered(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    with pytest.raises(ValueError, match=r"did not pin the 0\.00 GiB .* host_kv_gib .*\(2\); set it to less"):
        Owner(5 * 2**20)
    assert not cuda.sizes
