"""The error raised when a model cannot be loaded."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message says what was wrong, what was expected and what to do."""
