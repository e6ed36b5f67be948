"""Embeddings: many at once are each as alone, and take few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.values import embedding as module
from engine.values.embedding import Vector, embedding, embeddings
from tests.support.count_calls import count_calls


def states_of(count: int, size: int = 8) -> list[Vector]:
    """Hidden states, the first of which is zero."""
    made = np.random.default_rng(count).normal(size=(count, size)).astype(np.float32)
    made[0] = 0.0
    return list(made)


@pytest.mark.parametrize("options", [{}, {"dimensions": 3}, {"normalizes": False}])
@pytest.mark.parametrize("block", [1, 24, 2**18])
def test_many_embeddings_equal_those_of_each_by_itself(
    options: dict[str, Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    states = states_of(9)
    together = embeddings(states, **options)
    assert together.dtype == np.float32 and together.shape == (9, options.get("dimensions", 8))
    for state, row in zip(states, together, strict=True):
        assert np.array_equal(row, embedding(state, **options))
        cut = state[: options.get("dimensions")].astype(np.float64)
        is_scaled = options.get("normalizes", True) and cut.any()
        np.testing.assert_allclose(row, cut / np.linalg.norm(cut) if is_scaled else cut, rtol=1e-6)


def test_states_are_left_as_they_are() -> None:
    (state,) = states_of(2)[1:]
    before = state.copy()
    embedding(state)
    assert np.array_equal(state, before)


def test_many_take_no_more_steps_than_few() -> None:
    """In each step of numpy the interpreter's lock is given up and taken again, before other threads get it.

    Only whether it is an array is asked for each.
    """
    few, many = states_of(2), states_of(1000)
    embeddings(few)
    assert count_calls(lambda: embeddings(many)) == count_calls(lambda: embeddings(few)) + len(many) - len(few)
