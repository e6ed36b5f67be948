r"""Regular expressions of JSON schemas' formats and patterns, for grammars whose texts have no quotes.

    "format": "ipv4"         ─▶  [0-9]…
    "pattern": "^a|b"        ─▶  (?s:a(?s:.*)|(?s:.*)b(?s:.*))

llguidance enforces both in JSON, where texts are quoted. These are the same regular expressions, in its syntax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.base.errors import InvalidGrammar

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-9]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:(?:[0-5][0-9]|60)(?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_HOURS = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-\/=?\^_`{|}~]+"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_H16 = r"[0-9a-fA-F]{1,4}"
_LS32 = f"{_H16}:{_H16}"
_IPV6 = "|".join(
    [
        f"(?:{_H16}:){{7}}{_H16}",
        f"::(?:{_H16}:){{0,5}}{_LS32}",
        *(
            f"(?:(?:{_H16}:){{0,{before}}}{_H16})?::(?:{_H16}:){{{'0,' if after else ''}{after}}}{_LS32}"
            for before, after in enumerate((4, 3, 2))
        ),
        f"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
        f"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
)
_IP_LITERAL = "|".join(
    [
        f"(?:{_H16}:){{7}}{_H16}",
        f"(?:{_H16}:){{1,7}}:",
        *(f"(?:{_H16}:){{1,{7 - count}}}(?::{_H16}){{1,{count}}}" for count in range(1, 7)),
        f":(?::{_H16}){{1,7}}",
        "::",
        r"v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+",
    ]
)
_PCHAR = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_AUTHORITY = (
    r"(?:(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})*@)?"
    rf"(?:\[(?:{_IP_LITERAL})\]|{_IPV4}|(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{{2}})*)(?::[0-9]*)?"
)
_QUERY = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@\/?]|%[0-9a-fA-F]{2})*"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(?:\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "time": _TIME,
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:\/\/{_AUTHORITY}(?:\/{_PCHAR}*)*|\/(?:{_PCHAR}+(?:\/{_PCHAR}*)*)?"
        rf"|{_PCHAR}+(?:\/{_PCHAR}*)*|)(?:\?{_QUERY})?(?:\#{_QUERY})?"
    ),
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
"""The values of `format` that are enforced, as llguidance does. By the standard, all others are annotations."""
_ANYTHING = "(?s:.*)"
ANY_TEXT = f"/{_ANYTHING}/"
"""The expression of a terminal that any text matches."""
_BRACKETS = {"(": 1, ")": -1}
_TOKEN = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
"""Parts of a regular expression. A closing bracket that is the first in a class does not close it."""
_SHOWN = 64


def text_terminal(schema: Mapping[str, Any]) -> str:
    """Return an expression in Lark's syntax, for terminals, of the texts that a schema's `minLength`, `maxLength`,
    `pattern` and `format` allow, without quotes. Raises InvalidGrammar.
    """
    parts = []
    least, most = count_in(schema, "minLength") or 0, count_in(schema, "maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    if "pattern" in schema:
        parts.append(f"/{_searched(schema['pattern'])}/")
    named = schema.get("format", "")
    if not isinstance(named, str):
        raise InvalidGrammar("format must be a text")
    if named in FORMATS:
        parts.append(f"/{FORMATS[named]}/")
    return " & ".join(parts) or ANY_TEXT


def count_in(schema: Mapping[str, Any], keyword: str) -> int | None:
    """Return the number of a keyword; None if there is none. Raises InvalidGrammar unless it is a whole number."""
    given = schema.get(keyword)
    if given is None and keyword not in schema:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0 or given != int(given):
        raise InvalidGrammar(f"{keyword} must be a whole number from 0 on")
    return int(given)


def _searched(pattern: object) -> str:
    """Return a regular expression of all texts in which a schema's pattern is found.

    An anchor at an end of an alternative means that nothing else precedes or follows. Raises InvalidGrammar for
    others.
    """
    from llguidance import regex_to_lark  # Imported here: without grammars it need not be installed.

    if not isinstance(pattern, str):
        raise InvalidGrammar("pattern must be a text")
    found = []
    for parts in _alternatives(pattern):
        begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
        inside = parts[begins : len(parts) - ends]
        if "^" in inside or "$" in inside:
            raise InvalidGrammar(
                f"pattern {pattern[:_SHOWN]!r} is not supported in this model's syntax of arguments: ^ must begin "
                "an alternative outside of brackets, and $ end one"
            )
        found.append(f"{'' if begins else _ANYTHING}(?:{''.join(inside)}){'' if ends else _ANYTHING}")
    return f"(?:{regex_to_lark('|'.join(found), 'dw')})"


def _alternatives(pattern: str) -> list[list[str]]:
    """Split a regular expression at the bars outside of brackets, and each alternative into its parts."""
    found, in_class, in_group = [list[str]()], 0, 0
    for token in _TOKEN.findall(pattern):
        was_in_class = in_class
        if token[0] == "[" or (token == "]" and in_class):
            in_class += 1 if token[0] == "[" else -1
        elif not in_class:
            in_group += _BRACKETS.get(token, 0)
        if was_in_class:
            found[-1][-1] += token
        elif token == "|" and not in_group:
            found.append([])
        else:
            found[-1].append(token)
    return found
