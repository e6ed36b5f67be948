"""Describes faults in settings in one line, without the values, because some are secrets."""

from __future__ import annotations

from pydantic import ValidationError


def first_fault(error: ValidationError) -> str:
    """Return the place of the first wrong setting, and its fault."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
