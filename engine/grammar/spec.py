"""What an answer must match, as it is asked for: a value that travels with the request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole output of a request, up to its end."""

    kind: GrammarKind
    source: str = ""
    """The JSON text of a schema; "" for any JSON object; a regular expression; a JSON array of strings, one of
    which the answer is; a grammar in Lark's syntax, as llguidance understands it."""
