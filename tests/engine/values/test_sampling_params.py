"""Every sampling parameter out of its range is refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from engine.values.sampling_params import InvalidSamplingParams, SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *product(
            ("temperature", "min_p", "top_p", "repetition_penalty"), (-0.1, NAN, INFINITY, 1e9, "1", None, True)
        ),
        *product(("presence_penalty", "frequency_penalty"), (-2.1, 2.1, NAN, INFINITY)),
        *product(("top_k", "max_tokens", "min_tokens"), (-1, 2**40, 1.5, NAN, "1", True)),
        ("top_p", 0.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("seed", 2**70),
        ("seed", 1.0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", True),
        ("stop", ("",)),
        ("stop", ("x" * 257,)),
        ("stop", ("x",) * 9),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
    ],
)
def test_out_of_range(param: str, value: Any) -> None:
    with pytest.raises(InvalidSamplingParams, match=param) as raised:
        SamplingParams(**{param: value})
    assert raised.value.param == param


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, logprobs=20, seed=-1)
    SamplingParams(max_tokens=5, min_tokens=5, stop=("x" * 256,) * 8, logit_bias={0: -100, 1: 100})
