"""Errors that the user can correct, which end a command with one line instead of a traceback."""

from __future__ import annotations

import re


class UserError(Exception):
    """An error that the user can correct; the message says how."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def one_line(error: BaseException) -> str:
    """Return an exception's message without line breaks or error number, or its type if it has no message."""
    said = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(re.sub(r"^\[Errno -?\d+\] ", "", said).split()) or type(error).__name__


def with_file(error: BaseException) -> str:
    """Return `one_line`, preceded by the file that could not be opened or written."""
    file = error.filename if isinstance(error, OSError) else None
    return one_line(error) if file is None else f"{file}: {one_line(error)}"
