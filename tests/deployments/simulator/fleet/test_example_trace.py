"""The trace that comes with Raydix is what its program draws, and looks like a service's traffic."""

from __future__ import annotations

import gzip
from pathlib import Path

from deployments.simulator.fleet.bounds import pooled_hit_rate
from deployments.simulator.fleet.example_trace import EXAMPLE, text
from deployments.simulator.fleet.trace import read_trace


def test_the_file_has_the_trace_that_the_program_draws() -> None:
    drawn = gzip.decompress(EXAMPLE.read_bytes()).decode() == text()
    assert drawn, "run python -m deployments.simulator.fleet.example_trace"
    assert text(1) != text(), "the seed has no effect"
    assert EXAMPLE.stat().st_size < 200_000, "every installation carries it"


def test_the_example_trace_has_prefixes_that_conversations_share_and_continue() -> None:
    trace = read_trace(EXAMPLE)
    assert trace.has_prefixes and 3000 < len(trace.requests) < 10_000 and trace.requests[-1].time < 3600
    assert 0.6 < pooled_hit_rate(trace, 10**9) < 0.95
    prompts = {request.blocks for request in trace.requests}
    full = [blocks[:-1] for blocks in prompts if len(blocks) > 20]
    assert any(other[: len(blocks)] == blocks for blocks in full for other in prompts - {blocks}), "no second turn"


def test_the_page_states_the_number_of_its_requests() -> None:
    page = (Path(__file__).parents[4] / "docs" / "routing.md").read_text(encoding="utf-8")
    assert f"{len(read_trace(EXAMPLE).requests):,} requests" in page


def test_equal_numbers_are_equal_prefixes() -> None:
    """As in published traces: whoever has a block's number has all blocks before it."""
    before: dict[int, int | None] = {}
    for request in read_trace(EXAMPLE).requests:
        for parent, block in zip((None, *request.blocks), request.blocks, strict=False):
            assert before.setdefault(block, parent) == parent
