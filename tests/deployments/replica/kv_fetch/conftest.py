"""A sender and a fetcher for a test, closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.deployments.support.kv_ends import Ends


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*args: object, **options: object) -> Ends:
        made.append(Ends(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
