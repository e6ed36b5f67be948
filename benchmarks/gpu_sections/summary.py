"""The run in a text that fits everywhere: what failed first, then models, kernels and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.gpu_sections.messages import Measurement

MOST_CHARACTERS = 10_000
_LINE = 150
"""Longest line."""
_RESERVED = 120
"""Characters for the line that says how much was left out."""


def summarise(
    head: Sequence[str],
    measurements: Sequence[Measurement],
    failed: Mapping[str, str],
    left_out: Mapping[str, str],
    verdict: str,
    where: str,
) -> str:
    """Return the most important lines that fit; `where` names the file with all of them."""
    wrong = [line for line in measurements if line.passed is False]
    lines = [
        *head,
        verdict,
        *(f"FAILED {name}: {reason}" for name, reason in failed.items()),
        *(f"WRONG {line.what} by {line.by}: {line.note}" for line in wrong),
        *_blocks(measurements),
        *(f"left out {name}: {reason}" for name, reason in left_out.items()),
    ]
    kept: list[str] = []
    room = MOST_CHARACTERS - _RESERVED - len(where)
    for line in lines:
        short = line if len(line) <= _LINE else f"{line[: _LINE - 3]}..."
        room -= len(short) + 1
        if room < 0:
            break
        kept.append(short)
    left = len(lines) - len(kept)
    kept.append(f"everything: {where}" if not left else f"{left} lines more and everything: {where}")
    return "\n".join(kept)


def _blocks(measurements: Sequence[Measurement]) -> Iterator[str]:
    of_models = [line for line in measurements if line.model]
    for model in dict.fromkeys(line.model for line in of_models):
        yield from ("", model)
        yield from (_short(line) for line in of_models if line.model == model)
    rest = [line for line in measurements if not line.model]
    timed = [line for line in rest if line.ms is not None]
    yield from ("", "kernels and machine")
    yield from (_short(line) for line in rest if line not in timed and line.passed is None and line.note)
    yield from _best(timed)
    checks = [line for line in measurements if line.passed is not None]
    yield f"checks: {sum(bool(line.passed) for line in checks)} of {len(checks)} are right"


def _best(lines: Sequence[Measurement]) -> Iterator[str]:
    """A line for each kernel: ours, and the best of others beside it."""
    for what in dict.fromkeys(line.what for line in lines):
        own = sorted((line for line in lines if line.what == what), key=lambda line: line.ms or 0.0)
        ours = next((line for line in own if line.by in ("raydix", "triton")), own[0])
        other = next((line for line in own if line is not ours), None)
        beside = "" if other is None else f"; {other.by} {other.ms:.4f} ms"
        yield _short(ours) + beside


def _short(line: Measurement) -> str:
    def parts() -> Iterable[str]:
        yield line.what if line.by == "raydix" else f"{line.what} ({line.by})"
        if line.tokens_per_s is not None:
            yield f"{line.tokens_per_s:,.0f} tok/s"
        if line.ms is not None:
            yield f"{line.ms:.4f} ms"
        if line.sheet_share is not None:
            yield f"{line.sheet_share:.1%} of the sheet"
        if line.limit_share is not None:
            yield f"{line.limit_share:.1%} of the measured limit"
        if line.aim is not None:
            yield f"aim {line.aim:.0%}"
        if line.note:
            yield line.note

    return ", ".join(parts())
