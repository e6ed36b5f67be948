"""The messages of a child process: a line of JSON for each fact and each measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TextIO

PEERS = ("transformers", "vllm", "sglang")
"""Sections of third-party code, whose failure is not a failure of ours."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table."""

    what: str
    model: str = ""
    by: str = "raydix"
    tokens_per_s: float | None = None
    ms: float | None = None
    limit_share: float | None = None
    """The least time that the machine needs at the rates that were measured, over the time that it took."""
    sheet_share: float | None = None
    """The least time by the rates of the GPU's data sheet, over the time that it took."""
    aim: float | None = None
    """Target of `limit_share` on an H200."""
    passed: bool | None = None
    """Whether a check passed."""
    error: float | None = None
    """The largest that a check found."""
    note: str = ""


class Inapplicable(Exception):
    """A section makes no sense here, because something is not installed or does not fit."""


class Teller:
    """The child's way out: descriptor 1 as it was; from then on whatever prints there, prints to stderr."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def measured(self, measurement: Measurement) -> None:
        """A line of the table."""
        self.say("measured", asdict(measurement))

    def say(self, kind: str, value: str | Mapping[str, Any]) -> None:
        """`kind`: begin, end, skipped, failed (with a section's name), facts, measured."""
        print(json.dumps({kind: value}), file=self._out, flush=True)
