"""A sender and a fetcher for a test, closed at its end, and what ends NIXL's agents."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from tests.deployments.support.kv_ends import Ends


@pytest.fixture(autouse=True, scope="module")
def no_agent_is_left() -> Iterator[None]:
    """Collect what the tests of a module have left: an agent's thread takes a whole core until it is collected."""
    yield
    gc.collect()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*args: object, **options: object) -> Ends:
        made.append(Ends(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
