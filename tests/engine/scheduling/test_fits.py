"""Requests as long as the context: what is sampled after the scores of a prompt needs no room in it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.base.errors import NeverFits
from tests.engine.support.script import Script

LONGEST = 40


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_step_tokens", [2048, 39, 7, 1])
@pytest.mark.parametrize("pages", [10, 64])
def test_a_prompt_that_is_only_scored_may_take_all_of_the_context(
    overlap: bool, max_step_tokens: int, pages: int
) -> None:
    """With 10 pages, the prompt takes all pages that there are."""
    limits = {"max_model_len": LONGEST, "max_step_tokens": max_step_tokens, "max_running": 1}
    script = Script(num_pages=pages, limits=limits, overlap=overlap)
    name = script.arrive(range(LONGEST), max_tokens=1, prompt_logprobs=1)
    script.run()
    scores = script.scores(name)
    assert scores is not None and (scores.start, scores.end) == (1, LONGEST)
    assert script.reason(name) == "length" and script.nothing_held()


@pytest.mark.parametrize(
    ("num_prompt", "options"),
    [
        (LONGEST + 1, {"max_tokens": 1, "prompt_logprobs": 1}),
        (LONGEST, {"max_tokens": 2, "prompt_logprobs": 1}),
        (LONGEST, {"max_tokens": 1}),
    ],
)
def test_a_longer_prompt_or_one_with_more_output_does_not_fit(num_prompt: int, options: dict[str, Any]) -> None:
    script = Script(limits={"max_model_len": LONGEST})
    with pytest.raises(NeverFits, match="at most 40"):
        script.arrive(range(num_prompt), **options)
    script.arrive(range(LONGEST - 1), max_tokens=1)
