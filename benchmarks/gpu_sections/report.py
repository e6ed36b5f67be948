"""What was found, as JSON, as a table for people and as a picture; all written anew after each section."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.messages import Measurement
from benchmarks.gpu_sections.summary import summarise

_HEADER = ("what", "by", "tok/s", "ms", "% of sheet", "% of measured", "aim", "")
_NUMBERS = _HEADER[2:-1]


@dataclass(slots=True)
class Report:
    """One run, as far as it got."""

    out: Path | None
    """Where it is written, without the ending, or a folder for gpu_<the GPU>; None: `benchmarks/results`."""
    settings: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float | None] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Sections that were not run, and why."""
    failed: dict[str, str] = field(default_factory=dict)
    """Sections that ended with an error, and which."""

    @property
    def is_good(self) -> bool:
        """Whether every section that ran ended well, and every check passed."""
        return not self.failed and all(line.passed is not False for line in self.measurements)

    @property
    def path(self) -> Path:
        """Where it is written, without the ending."""
        if self.out is not None and not self.out.is_dir():
            return self.out
        folder = self.out or Path(__file__).parents[1] / "results"
        name = re.sub(r"[^a-z0-9]+", "_", str(self.facts.get("name", "unknown")).lower()).strip("_")
        return folder / f"gpu_{name}"

    def write(self) -> None:
        """The JSON file and the table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self) | {"out": self.path.name}
        _replace(self.path, ".json", json.dumps(content, indent=1) + "\n")
        _replace(self.path, ".txt", self.table() + "\n")

    def table(self) -> str:
        """A line for each measurement."""
        lines = [self._machine(), *([f"bounds: {self._bounds()}"] if self.rates else []), ""]
        models = dict.fromkeys(line.model for line in self.measurements)
        groups = [[line for line in self.measurements if line.model == model] for model in models]
        cells = [_HEADER, *map(_cells, self.measurements)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
        lines.append(_row(_HEADER, widths))
        for group in groups:
            lines += ["", group[0].model or "machine and kernels", *(_row(_cells(line), widths) for line in group)]
        lines += ["", *(f"left out: {name}: {reason}" for name, reason in self.left_out.items())]
        lines += [f"FAILED: {name}: {error}" for name, error in self.failed.items()]
        wrong = [line for line in self.measurements if line.passed is False]
        lines += [f"WRONG: {line.what} by {line.by}: {line.note}" for line in wrong]
        lines.append(self._verdict())
        return "\n".join(lines)

    def summary(self) -> str:
        """The most important of it, in at most 10,000 characters."""
        head = [self._machine(), *([f"bounds: {self._bounds()}"] if self.rates else ["bounds: not measured"])]
        where = f"{self.path}.txt, {self.path}.json"
        return summarise(head, self.measurements, self.failed, self.left_out, self._verdict(), where)

    def _verdict(self) -> str:
        return "all that ran is right" if self.is_good else "NOT all that ran is right"

    def _machine(self) -> str:
        return (
            ", ".join(f"{key} {value}" for key, value in self.facts.items() if value is not None) or "no machine"
        )

    def _bounds(self) -> str:
        def told(prefix: str) -> str:
            bandwidth, matmul = (self.rates.get(prefix + name) for name in ("bandwidth", "matmul"))
            if bandwidth is None or matmul is None:
                return "not known"
            return f"reads {bandwidth / 1e12:.3f} TB/s, products {matmul / 1e12:.1f} TFLOP/s"

        return f"{told('')} measured; {told('sheet_')} by the data sheet; aims are of the measured, for an H200"

    def draw(self) -> str:
        """The picture, where matplotlib imports and something was measured; what became of it."""
        shown = [line for line in self.measurements if line.limit_share is not None and line.model]
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            return f"no picture: {error}"
        if not shown:
            return "no picture: nothing to draw"
        models = list(dict.fromkeys(line.model for line in shown))
        figure = Figure(figsize=(6.0 * len(models), 0.28 * len(shown) / len(models) + 2.0), layout="constrained")
        for panel, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            lines = [line for line in shown if line.model == model][::-1]
            names = [line.what if line.by == "raydix" else f"{line.what} ({line.by})" for line in lines]
            colours = ["#d95f02" if line.by == "raydix" else "#999999" for line in lines]
            bars = panel.barh(names, [100 * (line.limit_share or 0) for line in lines], color=colours)
            panel.bar_label(
                bars, [f"{line.tokens_per_s or 0:,.0f} tok/s" for line in lines], fontsize=7, padding=2
            )
            for at, line in enumerate(lines):
                if line.aim is not None:
                    panel.plot([100 * line.aim] * 2, [at - 0.4, at + 0.4], color="#222222")
            panel.set(title=model, xlabel="% of the measured limit; black: aim on an H200", xlim=(0, 115))
            panel.tick_params(labelsize=8)
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self.facts.get("name", ""))
        figure.savefig(self.path.with_name(f"{self.path.name}.png"), dpi=110)
        return f"drawn: {self.path.name}.png"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Numbers end, and words begin, below each other."""
    padded = [
        cell.rjust(width) if _HEADER[column] in _NUMBERS else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _cells(line: Measurement) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    verdict = {None: "", True: "right; ", False: "WRONG; "}[line.passed]
    return (
        line.what,
        line.by,
        number(line.tokens_per_s, ",.0f"),
        number(line.ms, ",.3f"),
        number(None if line.sheet_share is None else 100 * line.sheet_share, ".1f"),
        number(None if line.limit_share is None else 100 * line.limit_share, ".1f"),
        number(None if line.aim is None else 100 * line.aim, ".0f"),
        verdict + line.note,
    )


def _replace(path: Path, ending: str, text: str) -> None:
    """Written beside and moved, so that a run that is cut off leaves whole files."""
    final = path.with_name(path.name + ending)
    unfinished = final.with_name(f"{final.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(final)
