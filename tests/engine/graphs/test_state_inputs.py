"""A graph makes the same tables of recurrent states from six numbers of each row as the host does. Between pieces
of graphs, states advance by the tables of the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.attention.state_batch import StateBatch, StateRow
from engine.attention.state_slots import LayerState
from engine.attention.step_in_pieces import Compute, StepInPieces
from engine.graphs.state_inputs import StateInputs
from engine.model_parts.parts import DeltaNetConfig
from engine.models.delta_net import GatedDeltaNet
from tests.engine.support.delta_nets import copy_of, layer_of

WIDTH, MOST_ROWS = 4, 5
SHAPE = DeltaNetConfig(1, 2, 8, 6, 3)
EMPTY = 2 * MOST_ROWS
CPU = torch.device("cpu")
ROWS = st.lists(
    st.tuples(st.integers(1, WIDTH), st.integers(0, WIDTH - 1), st.booleans(), st.booleans()),
    min_size=1,
    max_size=MOST_ROWS,
)


def step(batch: StateBatch) -> Any:
    return cast(Any, SimpleNamespace(batch=SimpleNamespace(states=batch)))


def step_in_pieces(batch: StateBatch) -> StepInPieces:
    """Calls outside of graphs are made immediately."""

    def outside(
        compute: Compute, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        found = compute(step(batch), *inputs)
        assert (found.shape[1:], found.dtype) == (shape, dtype)
        return found

    return StepInPieces(cast(Any, None), outside, lambda step: step, None)


def random_layer() -> tuple[GatedDeltaNet, LayerState]:
    """A layer and its slots."""
    layer = layer_of(SHAPE)
    for weights in (layer.in_proj.weight, layer.gates_proj, layer.o_proj.weight):
        torch.nn.init.normal_(weights, std=0.1)  # so that rounding stays small
    state = LayerState(
        torch.randn(EMPTY + 2, SHAPE.kernel - 1, SHAPE.channels),
        torch.randn(EMPTY + 2, SHAPE.num_value_heads, SHAPE.key_dim, SHAPE.value_dim),
        torch.randn(EMPTY + 2, WIDTH, SHAPE.channels + 2 * SHAPE.num_value_heads),
    )
    return layer, state


def assert_same_states(ours: LayerState, theirs: LayerState) -> None:
    """In all slots, except for that of padding."""
    kept = [slot for slot in range(EMPTY + 2) if slot != EMPTY]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[kept], other[kept])


@given(ROWS, st.integers(0, 2), st.integers(0, 2**32))
@example(
    [(WIDTH, 0, True, False), (WIDTH, 2, True, False)], 0, 1
)  # no padding before the last row's replayed tokens
def test_rows_of_any_lengths_and_drafts_compute_the_same(
    wanted: list[tuple[int, int, bool, bool]], num_empty: int, seed: int
) -> None:
    """Rows with and without drafts and replayed tokens, which go on in their slot or another, and empty rows."""
    torch.manual_seed(seed)
    rows, first, begin = [], 0, 0
    for number, (count, num_replayed, has_drafts, moves) in enumerate(wanted):
        source = 2 * number
        rows.append(StateRow(first, begin, count, source, source + moves, num_replayed, has_drafts, ()))
        first, begin = first + count, begin + num_replayed + count
    layer, state = random_layer()
    others, between = copy_of(state), copy_of(state)
    x = torch.randn(first, layer.in_proj.in_features)
    batch = StateBatch.of(rows, first)
    expected = layer(x, cast(Any, None), step(batch), state)

    size = min(len(rows) + num_empty, MOST_ROWS)
    inputs = StateInputs(MOST_ROWS, EMPTY, CPU)
    assert inputs.fits(batch, WIDTH)
    inputs.write(StateBatch.of((rows * MOST_ROWS)[:MOST_ROWS], 99), MOST_ROWS)  # a step before
    inputs.write(batch, size)
    padded = torch.cat((x, torch.randn(size * WIDTH - first, x.shape[1])))
    found = layer(padded, cast(Any, None), step(inputs.batch(size, WIDTH)), others)

    in_pieces = layer(x, cast(Any, None), step_in_pieces(batch), between)

    torch.testing.assert_close(found[:first], expected)
    assert torch.equal(in_pieces, expected) and all(map(torch.equal, between, state))
    assert_same_states(others, state)


@given(st.lists(st.booleans(), min_size=1, max_size=MOST_ROWS), st.integers(0, 2), st.sampled_from([1, 2, WIDTH]))
def test_decodes_compute_the_same_in_rows_of_any_width(moves: list[bool], num_empty: int, width: int) -> None:
    """Each in its slot or from it into another one, as in stages of pipelines."""
    torch.manual_seed(len(moves) + width)
    layer, state = random_layer()
    others, x = copy_of(state), torch.randn(len(moves), layer.in_proj.in_features)
    batch = StateBatch.of([], len(moves), [(row, 2 * row, 2 * row + moved) for row, moved in enumerate(moves)])
    expected = layer(x, cast(Any, None), step(batch), state)
    size, inputs = min(len(moves) + num_empty, MOST_ROWS), StateInputs(MOST_ROWS, EMPTY, CPU)
    assert inputs.fits(batch, width)
    inputs.write(batch, size)
    padded = torch.cat((x, torch.randn(size * width - len(x), x.shape[1])))
    found = layer(padded, cast(Any, None), step(inputs.batch(size, width)), others)
    torch.testing.assert_close(found[: len(x)], expected)
    assert_same_states(others, state)


def test_rows_that_keep_states_at_borders_or_replay_too_much_do_not_fit() -> None:
    def fits(num_replayed: int, borders: list[tuple[int, int]]) -> bool:
        return StateInputs.fits(StateBatch.of([StateRow(0, 0, 2, 0, 1, num_replayed, True, borders)], 2), WIDTH)

    assert fits(WIDTH - 1, [])
    assert not fits(WIDTH, []) and not fits(0, [(1, 3)])
