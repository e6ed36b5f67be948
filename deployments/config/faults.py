"""Describes faults in settings in one line, without the values, because some are secrets."""

from __future__ import annotations

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_EXPECTED = {
    "missing": "must be given",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping of settings",
    "model_attributes_type": "must be a mapping of settings",
    "dataclass_type": "must be a mapping of settings",
}
"""Messages for the types of pydantic's errors whose own messages name Python's types."""


_FORM = re.compile(r"(constrained|function)-|(literal|list|tuple|dict)\[|(int|float|bool|str)$")
"""Begins the last part of the place of an error in one form of several that a setting may have."""


def first_fault(error: ValidationError, root: str = "") -> str:
    """Return the place of the first wrong setting, below `root`, and its fault."""
    faults = error.errors(include_url=False, include_input=False)
    place = faults[0]["loc"]
    expected = _expected(faults[0])
    if place and _FORM.match(str(place[-1])):
        place = place[:-1]
        others = [_expected(fault) for fault in faults[1:] if fault["loc"][:-1] == place]
        expected = " or ".join([expected, *(other.removeprefix("must be ") for other in others)])
    where = ".".join(map(str, [root, *place] if root else place))
    return f"{where}: {expected}" if where else expected


def _expected(fault: ErrorDetails) -> str:
    said = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return _EXPECTED.get(fault["type"], said)
