"""Why a batch does not start, or does not go on."""

from __future__ import annotations


class BatchFileError(Exception):
    """A file cannot be used as it is; the message names it and says what to do."""


class BatchStopped(Exception):
    """A batch ended before its end. What was answered stays answered; the rest can be sent again."""
