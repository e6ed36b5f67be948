"""Errors that keep a batch from starting or continuing."""

from __future__ import annotations


class BatchFileError(Exception):
    """A file cannot be used as it is; the message names it and says what to do."""


class BatchStopped(Exception):
    """A batch stopped early. Its answers stay; the other requests can be sent again."""
