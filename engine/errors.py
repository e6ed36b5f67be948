"""What an engine answers to a request it does not take."""

from __future__ import annotations


class NeverFits(ValueError):
    """The request is larger than this engine can ever serve; the message says by how much."""


class QueueFull(Exception):
    """Too much is waiting already; the same request may be taken later."""


class EngineStopped(RuntimeError):
    """The engine's loop has ended, on request or because of an error; it takes nothing any more."""


class InvalidGrammar(ValueError):
    """No output can be held to this grammar: it is malformed, too complex, or says what is not supported."""


class RankLost(RuntimeError):
    """A rank of a model on several devices has ended, or did not do its part: no step can be computed any more."""
