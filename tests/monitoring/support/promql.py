"""Checks of PromQL expressions against the table of metrics.

Not a parser: Prometheus has one, and the tests use it. These checks find errors that Prometheus cannot know: a
metric, a label or a label's value that Raydix never serves, a rate of a metric that is no counter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from monitoring.metric_table import BY_NAME, PREFIX, Metric
from monitoring.totals import GONE

_TOKEN = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<comment>\#.*)|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<number>[\d.][\w.]*)|(?P<sign>=~|!~|!=|==|<=|>=|\S)""",
    re.VERBOSE,
)
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "atan2", "offset", "bool", "inf", "nan"}
_RATES = {"rate", "increase", "irate", "resets"}
_TARGET_LABELS = {"job", "instance"}
"""Labels that Prometheus adds to every series."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition within braces."""

    label: str
    operator: str
    """=, !=, =~ or !~."""
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """One place where an expression reads series."""

    name: str
    matchers: tuple[Matcher, ...] = ()
    range: str = ""
    """As written, without the brackets; "": it reads the latest value."""
    function: str = ""
    """The function that has it as its first argument; "" if there is none."""

    def __str__(self) -> str:
        conditions = ",".join(f'{m.label}{m.operator}"{m.value}"' for m in self.matchers)
        return f"{self.name}{{{conditions}}}" if conditions else self.name


def selectors(expression: str) -> list[Selector]:
    """Return all series that an expression reads, in its order."""
    return [found for found in _parts(expression) if isinstance(found, Selector)]


def labels_listed(expression: str) -> set[str]:
    """Return the labels by which the expression groups or joins."""
    return {found for found in _parts(expression) if isinstance(found, str)}


def problems(expression: str, recorded: Mapping[str, set[str]] | None = None) -> list[str]:
    """Return the errors in an expression over Raydix' metrics. `recorded`: recording rules and their labels.

    A value with a "$" is a dashboard's variable and may be anything.
    """
    known = recorded or {}
    found, available = [], set(_TARGET_LABELS)
    for selector in selectors(expression):
        if selector.name in known:
            labels: set[str] | None = known[selector.name]
            found += _unknown_labels(selector, known[selector.name])
        else:
            labels = _labels(selector.name)
            found += _misuse(selector) if labels else [f"no metric is named {selector.name}"]
        available |= labels or set()
    return found + [f"no series here has the label {label}" for label in labels_listed(expression) - available]


def _labels(name: str) -> set[str] | None:
    """Return the labels of a series of the table; None when it is not in the table."""
    metric, suffix = _metric(name)
    if metric is None:
        return None
    own = {"model_name", *metric.labels, *_TARGET_LABELS}
    if metric.kind != "histogram":
        return own | {"replica"}
    return own | {"le"} if suffix == "bucket" else own


def _metric(name: str) -> tuple[Metric | None, str]:
    """Return a series' definition, and the suffix that distinguishes a histogram's series."""
    if not name.startswith(PREFIX):
        return None, ""
    short = name.removeprefix(PREFIX)
    if short in BY_NAME and BY_NAME[short].kind != "histogram":
        return BY_NAME[short], ""
    base, _, suffix = short.rpartition("_")
    metric = BY_NAME.get(base)
    is_series = metric is not None and metric.kind == "histogram" and suffix in ("bucket", "sum", "count")
    return (metric, suffix) if is_series else (None, "")


def _misuse(selector: Selector) -> list[str]:
    metric, _ = _metric(selector.name)
    assert metric is not None
    found = _unknown_labels(selector, _labels(selector.name) or set())
    for matcher in selector.matchers:
        choices = metric.labels.get(matcher.label)
        if choices is not None and "$" not in matcher.value:
            found += _unknown_values(selector, matcher, choices)
    is_counted = metric.kind != "gauge"
    if selector.function in _RATES and not is_counted:
        found.append(f"{selector.function}() of the gauge {selector.name}")
    if is_counted and not selector.range:
        found.append(f"{selector.name} only ever grows: take its rate() or increase()")
    if metric.kind == "counter" and selector.range and not _omits_gone(selector):
        # The counts of replicas move there when these end: a jump without an event.
        found.append(f'{selector} needs replica!="{GONE}"')
    return found


def _unknown_labels(selector: Selector, labels: set[str]) -> list[str]:
    return [f"{selector.name} has no label {m.label}" for m in selector.matchers if m.label not in labels]


def _unknown_values(selector: Selector, matcher: Matcher, choices: tuple[str, ...]) -> list[str]:
    """Return an error for each alternative of a matcher that is not an existing value."""
    alternatives = matcher.value.split("|") if "~" in matcher.operator else [matcher.value]
    wrong = [each for each in alternatives if not any(_matches(each, choice, matcher) for choice in choices)]
    return [f"{selector.name}: {matcher.label} is never {each!r}, but one of {choices}" for each in wrong]


def _matches(value: str, choice: str, matcher: Matcher) -> bool:
    return bool(re.fullmatch(value, choice)) if "~" in matcher.operator else value == choice


def _omits_gone(selector: Selector) -> bool:
    for matcher in selector.matchers:
        if matcher.label == "replica" and (matcher.operator, matcher.value) in {("!=", GONE), ("!~", GONE)}:
            return True
        if matcher.label == "replica" and matcher.operator == "=" and matcher.value != GONE:
            return True
    return False


def _parts(expression: str) -> Iterator[Selector | str]:
    """Yield selectors, and the labels of by, on and the like."""
    tokens = [(m.lastgroup, m.group()) for m in _TOKEN.finditer(expression) if m.lastgroup != "comment"]
    tokens += [("end", "")] * 2
    at, function = 0, ""
    while tokens[at][0] != "end":
        kind, text = tokens[at]
        at += 1
        if kind != "name":
            function = function if text == "(" else ""
        elif text in _LABEL_LISTS:
            at, listed = _label_list(tokens, at)
            yield from listed
        elif text.lower() in _WORDS:
            function = ""
        elif tokens[at][1] in ("(", "by", "without"):
            function = text
        else:
            at, matchers = _matchers(tokens, at)
            window = tokens[at][1][1:-1] if tokens[at][0] == "range" else ""
            yield Selector(text, matchers, window, function)
            function = ""


def _label_list(tokens: list[tuple[str | None, str]], at: int) -> tuple[int, list[str]]:
    """Return the names between the parentheses that begin at `at`; group_left may have none."""
    if tokens[at][1] != "(":
        return at, []
    end = next(i for i in range(at, len(tokens)) if tokens[i][1] in (")", ""))
    return end, [text for kind, text in tokens[at:end] if kind == "name"]


def _matchers(tokens: list[tuple[str | None, str]], at: int) -> tuple[int, tuple[Matcher, ...]]:
    """Return the conditions between the braces that begin at `at`, if any."""
    if tokens[at][1] != "{":
        return at, ()
    end = next(i for i in range(at, len(tokens)) if tokens[i][1] in ("}", ""))
    inner = [text for _, text in tokens[at + 1 : end] if text != ","]
    triples = [inner[i : i + 3] for i in range(0, len(inner) - 2, 3)]
    return end + 1, tuple(Matcher(label, operator, value[1:-1]) for label, operator, value in triples)
