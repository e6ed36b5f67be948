"""The grammar that a request's output must match: a value that travels with the request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]
MatcherName = Literal["llguidance", "xgrammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole output of a request, up to its end."""

    kind: GrammarKind
    source: str = ""
    """Depending on `kind`: the JSON text of a schema; "" for any JSON object; a regular expression; a JSON array
    of strings, one of which the output must be; or a grammar in llguidance's dialect of Lark, or in llama.cpp's
    GBNF."""
    compiled_bytes: int = field(default=0, compare=False)
    """Bytes of the compiled grammar, as measured by the trial (`engine.grammar.trial`); 0: not measured."""
    matcher: MatcherName | None = field(default=None, compare=False)
    """The library that follows it faster, by the trial; None: not tried."""
