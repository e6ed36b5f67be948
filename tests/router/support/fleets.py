"""Makes fleets and prompts to route, by hand and by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from router.cost import Candidate, RouteQuery


def candidate(replica: str = "a", **changes: Any) -> Candidate:
    """An idle replica with a half-empty memory, but for `changes`."""
    values: dict[str, Any] = {
        "replica": replica,
        "queued_prefill_tokens": 0.0,
        "num_running": 0,
        "pages_free": 500,
        "pages_total": 1000,
        "evict_price": 0.0,
        "prefill_rate": 10_000.0,
        "decode_tokens_per_s": 0.0,
        "is_available": True,
    }
    return Candidate(**(values | changes))


def query(num_tokens: int = 1000, overlap: dict[str, int] | None = None, **changes: Any) -> RouteQuery:
    """A prompt, cold unless `overlap` says otherwise."""
    values: dict[str, Any] = {"key": 7, "session": None, "utilisation": 0.5}
    return RouteQuery(num_tokens=num_tokens, overlap=overlap or {}, **(values | changes))


NAMES = [f"r{number}" for number in range(12)]


@st.composite
def candidates(draw: st.DrawFn, replica: str = "a") -> Candidate:
    total = draw(st.integers(0, 5000))
    return Candidate(
        replica=replica,
        queued_prefill_tokens=draw(st.floats(0, 1e6)),
        num_running=draw(st.integers(0, 300)),
        pages_free=draw(st.integers(0, total)),
        pages_total=total,
        evict_price=draw(st.floats(0, 1e-3)),
        prefill_rate=draw(st.floats(1.0, 1e6)),
        decode_tokens_per_s=draw(st.just(0.0) | st.floats(1.0, 1e5)),
        is_available=draw(st.booleans()),
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=len(NAMES)))
    return [draw(candidates(name)) for name in names]


@st.composite
def queries(draw: st.DrawFn) -> RouteQuery:
    num_tokens = draw(st.integers(1, 200_000))
    overlap = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, num_tokens)))
    return RouteQuery(
        num_tokens=num_tokens,
        overlap=overlap,
        key=draw(st.integers(0, 2**64 - 1)),
        session=draw(st.none() | st.sampled_from(["s", "t"])),
        utilisation=draw(st.floats(0, 1)),
        chain=tuple(draw(st.lists(st.integers(1, 50), max_size=8))),
    )


@dataclass
class Prompt:
    request_id: str
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    model: str = "m"
    salt: str = ""
    session_id: str | None = None
    most_reusable: int = 10**9
    block_hashes: list[int] | None = None

    @property
    def num_reusable(self) -> int:
        return min(self.most_reusable, len(self.prompt_ids) + len(self.output_ids))
