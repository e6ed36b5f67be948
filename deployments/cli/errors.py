"""Errors that the user can correct, which end a command with one line instead of a traceback."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can correct; the message says how."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    """Return an exception's message without line breaks, or its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
