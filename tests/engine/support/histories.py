"""Random histories of an engine's requests, for models of which prefixes can be reused at some places alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.engine.support.script import Script

Action = tuple[str, int, int, int]


def histories(longest_prompt: int, fewest: int = 0) -> st.SearchStrategy[list[Action]]:
    """Draw what is asked, gone on with, aborted, failed and forgotten between steps: at least so many actions."""
    action = st.tuples(
        st.sampled_from(["ask"] * 5 + ["step"] * 9 + ["turn", "turn", "abort", "fail", "reset"]),
        st.integers(0, 3),
        st.integers(1, longest_prompt),
        st.integers(1, 12),
    )
    return st.lists(action, min_size=fewest, max_size=60)


def served(script: Script, prompt: list[int], **options: Any) -> int:
    """Run one request to its end; returns how many of its tokens were found."""
    name = script.arrive(prompt, **options)
    script.run()
    assert script.tokens(name) == script.undisturbed(name)
    return script.events[name][-1].num_cached


def play(script: Script, actions: Sequence[Action]) -> None:
    """Do all that, run to the end, and check that each request got the tokens that it gets alone."""
    longest = script.scheduler.max_model_len
    do: dict[str, Callable[[int, int, int], object]] = {
        "ask": lambda family, length, number: script.arrive(
            [family // 2 * 50 + 1, *range(length), family][: max(1, longest - number)],
            max_tokens=min(number, longest - 1),
            salt="a" * (family == 3),
        ),
        "turn": lambda family, length, number: _next_turn(script, family, number),
        "abort": lambda family, length, number: script.abort(list(script.requests)[number % len(script.requests)]),
        "fail": lambda family, length, number: setattr(script.runner, "fail_next", True),
        "reset": lambda family, length, number: script.scheduler.reset_cache(),
        "step": lambda family, length, number: script.loop.has_work and script.step(),
    }
    for action, *numbers in actions:
        if script.requests or action == "ask":
            do[action](*numbers)
    script.runner.fail_next = False
    script.run()
    for name in script.requests:
        tokens, _ = script.alone(name)
        assert script.tokens(name) == tokens[: len(script.tokens(name))]
        assert script.reason(name) in ("abort", "error") or script.tokens(name) == tokens
    assert script.nothing_held()
    script.scheduler.reset_cache()


def _next_turn(script: Script, number: int, length: int) -> None:
    """Go on with what a request has got so far, if there is room for it."""
    name = list(script.requests)[number % len(script.requests)]
    prompt = [*script.requests[name].prompt_ids, *script.tokens(name), 77]
    if len(prompt) + length <= script.scheduler.max_model_len:
        script.arrive(prompt, max_tokens=length)
