"""The engine that all scenarios share: each runs with overlap and without, and ends with the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.support.script import Script

Make = Callable[..., Script]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes engines. In the end each request was served as if alone, and nothing is held."""
    scripts: list[Script] = []

    def make(**options: Any) -> Script:
        scripts.append(Script(**{"overlap": request.param, **options}))
        return scripts[-1]

    yield make
    for script in scripts:
        script.run()
        for name in script.requests:
            reason, got, (tokens, end) = script.reason(name), script.tokens(name), script.alone(name)
            if reason in ("abort", "error"):
                assert got == tokens[: len(got)], f"{name} was sent {got} of {tokens}"
                assert reason == "abort" or name in script.runner.failed
            else:
                assert (got, reason) == (tokens, end), name
        assert script.nothing_held(), script.scheduler.account()
        script.cache.reset()
        assert script.scheduler.account().free == script.num_pages, "pages that no request holds can be evicted"
