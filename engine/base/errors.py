"""Errors with which an engine rejects requests, or ends."""

from __future__ import annotations


class NeverFits(ValueError):
    """The request is larger than this engine can ever serve; the message says by how much."""


class QueueFull(Exception):
    """Too many requests are waiting; the same request may be accepted later."""


class EngineStopped(RuntimeError):
    """The engine's loop has ended, on request or because of an error; it accepts no more requests."""


class InvalidGrammar(ValueError):
    """The grammar cannot be used: it is malformed, too complex, or has a feature that is not supported."""


class EngineBroken(RuntimeError):
    """No further step can be computed: the engine ends, and its requests can resume at another."""


class RankLost(EngineBroken):
    """A rank of a model on several devices has ended or failed."""


class ModelLoadError(ValueError):
    """A model cannot be loaded; the message says what was wrong, what was expected and what to do."""
