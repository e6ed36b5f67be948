"""Steps copy between host and device through pinned memory alone."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.pinned import on_device, on_host

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
