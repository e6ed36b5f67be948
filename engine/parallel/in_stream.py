"""NCCL on the stream that a step runs on, so that graphs record its operations with the step's own."""

from __future__ import annotations

from typing import Any


def in_stream(options: Any) -> Any:
    """Let NCCL work on the current stream, if torch supports it; a separate stream would need events."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def finish(work: Any) -> None:
    """Wait for an operation. Later ones on the stream wait for it anyway; None if it is on the stream."""
    if work is not None:
        work.wait()
