"""The requests of a version, as the metrics of its processes count them, and what they say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from deployments.telemetry.scrape import quantile_of
from monitoring.metric_table import BY_NAME
from monitoring.totals import Totals

_TTFT, _TPOT = "time_to_first_token_seconds", "time_per_output_token_seconds"
_Q = 0.95


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantity that a limit bounds."""

    value: float | None
    """None where nothing was observed."""
    num_requests: int
    """Requests that it was observed for."""


@dataclass(frozen=True, slots=True)
class VersionCounts:
    """Counts since some moment."""

    num_ended: float = 0
    """Requests that ended without an error of the server."""
    num_failed: float = 0
    """Requests that were answered with a status of 500 or more."""
    ttft: Sequence[int] = ()
    """Times to the first token by bucket, not cumulative; empty for none."""
    tpot: Sequence[int] = ()

    @classmethod
    def of(cls, totals: Totals, model_name: str) -> VersionCounts:
        """Read the totals of a model. An accepted request that fails counts in two metrics, but here once."""
        return cls(
            sum(
                count
                for key, count in totals.counters("requests_total").items()
                if _label("requests_total", key, "finish_reason") != "error"
            ),
            sum(
                count
                for key, count in totals.counters("request_errors_total").items()
                if _label("request_errors_total", key, "status").startswith("5")
            ),
            _buckets(totals, _TTFT, model_name),
            _buckets(totals, _TPOT, model_name),
        )

    def since(self, earlier: VersionCounts) -> VersionCounts:
        """Return the counts since an earlier moment."""
        return VersionCounts(
            self.num_ended - earlier.num_ended,
            self.num_failed - earlier.num_failed,
            _less(self.ttft, earlier.ttft),
            _less(self.tpot, earlier.tpot),
        )

    def measured(self) -> Mapping[str, Measured]:
        """Return each quantity by the name of its limit."""
        num_requests = self.num_ended + self.num_failed
        return {
            "error_rate": Measured(self.num_failed / num_requests if num_requests else None, int(num_requests)),
            "ttft_p95": Measured(_quantile(self.ttft, _TTFT), sum(self.ttft)),
            "tpot_p95": Measured(_quantile(self.tpot, _TPOT), sum(self.tpot)),
        }


def _label(name: str, key: Sequence[str], label: str) -> str:
    """Return a label's value in the key of a counter, which begins with the model's and the replica's names."""
    return key[2 + list(BY_NAME[name].labels).index(label)]


def _buckets(totals: Totals, name: str, model_name: str) -> Sequence[int]:
    merged = totals.histograms(name).get((model_name,))
    return () if merged is None else merged.counts


def _less(counts: Sequence[int], earlier: Sequence[int]) -> Sequence[int]:
    return [now - before for now, before in zip(counts, earlier, strict=True)] if earlier else counts


def _quantile(counts: Sequence[int], name: str) -> float | None:
    bounds = (*BY_NAME[name].buckets, float("inf"))
    return quantile_of(dict(zip(bounds, accumulate(counts), strict=False)), _Q)
