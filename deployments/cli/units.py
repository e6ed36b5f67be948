"""Formats bytes, counts, durations and rates for readers."""

from __future__ import annotations


def size_text(num_bytes: float) -> str:
    """Format bytes: 12,884,901,888 -> "12.0 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def count_text(number: float) -> str:
    """Format a count with three digits, below 1,000 without a unit: 8,030,261,248 -> "8.03B"."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= limit * 0.9995:  # 999,600 is 1M, not 1e+03K
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def seconds_text(seconds: float) -> str:
    """Format seconds: 0.0123 -> "12.3 ms"; seconds below two minutes, minutes below two hours, then hours."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
