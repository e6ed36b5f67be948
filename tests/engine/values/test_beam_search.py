"""The selection of beams against transformers' beam search, on log-probabilities of the same models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.values.beam_search import (
    BeamCandidate,
    BeamParams,
    BeamSearch,
    EarlyStopping,
    Hypothesis,
    best_candidates,
)
from tests.engine.support.oracle import (
    BEAM_EOS,
    VOCAB,
    assert_same_hypotheses,
    oracle_beams,
    oracle_logits,
    save_tiny,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def search(model: Path, prompt: list[int], params: BeamParams, n: int, eos: Sequence[int]) -> list[Hypothesis]:
    """Beam search without an engine: every step computes all beams from scratch."""
    found = BeamSearch(params, frozenset(eos), n)
    count = params.num_candidates(len(eos))
    beams: list[list[int]] = [[]]
    while beams:
        continuations = []
        for output in beams:
            logprobs = torch.log_softmax(oracle_logits(model, [*prompt, *output])[-1], -1)
            best = logprobs.topk(min(count, VOCAB))
            continuations.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        chosen = found.advance(beams, continuations)
        beams = [[*beams[candidate.beam], candidate.token_id] for candidate in chosen]
    return found.finished[: params.num_returned]


STOPS: list[EarlyStopping] = [False, True, "never"]
PENALTIES = [-0.7, 0.0, 1.0, 2.5]
SEARCHES = [
    (penalty, stops, (number + other) % 2 == 0)
    for number, penalty in enumerate(PENALTIES)
    for other, stops in enumerate(STOPS)
]
"""All pairs of a penalty, a rule to stop, and whether there are ends of text."""


@pytest.mark.parametrize(("length_penalty", "early_stopping", "with_eos"), SEARCHES)
def test_tokens_and_scores_are_those_of_transformers(
    model: Path, length_penalty: float, early_stopping: EarlyStopping, with_eos: bool
) -> None:
    eos = BEAM_EOS if with_eos else []
    for width in range(1, 7):
        draw = random.Random(width)
        prompt, n = draw.choices(range(VOCAB), k=7), draw.randint(1, 16)
        params = BeamParams(width, draw.randint(1, width), length_penalty, early_stopping)
        ours = search(model, prompt, params, n, eos)
        assert_same_hypotheses(ours, oracle_beams(model, prompt, params, n, eos))


def test_the_ends_of_text_play_a_part(model: Path) -> None:
    """The test above would otherwise not cover ends of text."""
    found = search(model, [1, 2, 3], BeamParams(4, 4), 9, BEAM_EOS)
    ended = [hypothesis for hypothesis in found if hypothesis.token_ids[-1] in BEAM_EOS]
    assert ended and any(len(hypothesis.token_ids) < 9 for hypothesis in ended)


def test_equal_scores_go_to_the_first_beam_and_the_lowest_token() -> None:
    found = best_candidates([0.0, 0.0], [[(9, -1.0), (3, -1.0)], [(1, -1.0)]], 2)
    assert found == [BeamCandidate(-1.0, 0, 3), BeamCandidate(-1.0, 0, 9)]


def test_an_impossible_token_is_no_candidate() -> None:
    assert best_candidates([0.0], [[(1, float("-inf"))]], 4) == []
    search = BeamSearch(BeamParams(2), frozenset(), 5)
    assert search.advance([[]], [[(1, float("-inf")), (2, float("-inf"))]]) == [] and search.finished == []


def test_a_search_whose_best_candidates_all_end_also_continues() -> None:
    """There are three ends and two beams: six candidates end, two more go on."""
    stops = frozenset((1, 2, 3))
    search = BeamSearch(BeamParams(2), stops, 5)
    best = [(1, -0.1), (2, -0.2), (3, -0.3), (4, -5.0), (5, -6.0), (6, -7.0), (7, -8.0), (8, -9.0)]
    assert [candidate.token_id for candidate in search.advance([[]], [best])] == []  # none could still win
    search = BeamSearch(BeamParams(2, early_stopping="never", length_penalty=9.0), stops, 50)
    first = search.advance([[]], [best])
    second = search.advance([[c.token_id] for c in first], [best, best])
    assert [(c.beam, c.token_id) for c in second] == [(0, 4), (0, 5)]
    assert [h.token_ids for h in search.finished] == [(4, 1), (4, 2)]
