"""What holds for all tests: each computes with one thread, none fails for being slow, and none logs for the next.

With more threads, tiny models are slow on a busy machine.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from functools import cache

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import examples
from tests.support.fake_openai import Server, fake_openai
from tests.support.slow_tests import read_table

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# httpx reads the certificates of all authorities for each client, which takes longer than most requests of tests.
pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The examples are the same each time, so that a failure is that of the change under test.
# --hypothesis-profile=search --hypothesis-seed=N looks for others, and RAYDIX_TEST_EXAMPLES=10 for more of them.
settings.register_profile(
    "raydix", settings.get_profile("search"), derandomize=True, database=None, max_examples=examples(50)
)
settings.load_profile("raydix")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let no collection of garbage look at thousands of tests and all that they import, neither while they are
    imported nor later: it would take a tenth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow."""
    slow = read_table().slow
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def little_to_look_at() -> None:
    """Let no later collection look at what the modules before this one have imported and keep."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fake_server() -> Iterator[Server]:
    """An OpenAI-compatible server for tests of clients."""
    with fake_openai() as running:
        yield running


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Undo `log_through_serve`, which each engine replica calls: a later test would see its log records twice."""
    yield
    for package in ("deployments", "engine", "router", "monitoring"):
        logger = logging.getLogger(package)
        logger.handlers.clear()
        if logger.level != logging.NOTSET:  # to set it makes every logger forget whether it is enabled
            logger.setLevel(logging.NOTSET)
