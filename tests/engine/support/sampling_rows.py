"""Rows to sample for, with every sampling parameter, and how two samplers' reports are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from cache import Namespace
from engine.sampling.graph_chooser import RowParams
from engine.values.logprobs import TokenLogprobs
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

EOS = frozenset({1, 10**6})


def row(params: dict[str, Any], seed: int = 0, output: int = 4, vocab_size: int = 12) -> SamplingRow:
    """The row of a request with some history; its last token is one that only the device knows."""
    prompt = 3
    tokens = np.random.default_rng(abs(seed)).integers(0, min(vocab_size, 12), prompt + output).tolist()
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    made = Request.make(
        "r",
        tokens[:prompt],
        sampling,
        arrival=0.0,
        seed=seed,
        namespace=Namespace("m"),
        output_ids=tokens[prompt:],
    )
    return SamplingRow(made, prompt + output - 1, tokens[-1:]) if output else SamplingRow.of(made)


def row_params(seeds: torch.Tensor, inverse: Sequence[float], top_k: Sequence[int] = ()) -> RowParams:
    """Parameters of rows whose temperatures, and `top_k` if given, differ; these have a top-p and min-p too."""
    count = len(seeds)
    return RowParams(
        seeds,
        torch.tensor(inverse, dtype=torch.float64),
        torch.tensor(top_k or [0] * count, dtype=torch.int32),
        torch.full((count,), 0.8 if top_k else 1.0, dtype=torch.float64),
        torch.full((count,), 0.01 if top_k else 0.0, dtype=torch.float64),
    )


def assert_same_logprobs(mine: TokenLogprobs | None, other: TokenLogprobs | None) -> None:
    assert (mine is None) == (other is None)
    if mine is None or other is None:
        return
    assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 0.8, 1.0, 2.5, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 50, 300, 2**31 - 1]),
        "top_p": st.sampled_from([1e-9, 0.013, 0.37, 0.773, 0.951, 0.99999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-12, 0.0313, 0.517, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -1.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -2.0]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}, {0: -100.0, 2**40: 3.0}]),
        "min_tokens": st.sampled_from([0, 10]),
        "stop_token_ids": st.sampled_from([(), (2, 2**40)]),
        "logprobs": st.sampled_from([None, 0, 3, 20]),
    },
)
