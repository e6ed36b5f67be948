"""Mistakes of the user end in one line, never in a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right; the message says what and how."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks, or its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
