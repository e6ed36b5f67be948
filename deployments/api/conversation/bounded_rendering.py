"""Bounds chat templates: the processor time of a rendering, and the size of every value that it makes.

A template comes from a model's files, and runs on clients' data. It cannot be interrupted from outside, so the
environment in which it is compiled counts its steps: each iteration of a loop, each filter, call, operator and
output. Each step is short because its values are small, and the time is checked between steps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_LOOK_EVERY = 16
_LOOK_AFTER = 4096
"""Steps between two looks at the clock, and values that are measured between two."""
_ENTRY = 32
"""Size of a value, or of a place in an array or object, besides its text."""
_MAX_BITS = 4096
_MAX_WIDTH = 100_000
"""Most that an integer may ask for: blanks to fill in, entries of a part."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{6})|:[^{}]*(\{|[0-9]{6})")
"""A width in a format that is huge, or comes from a value."""
_TICK, _MADE, _JOINED = "raydix_tick", "raydix_made", "raydix_joined"


class TemplateLimit(Exception):
    """A rendering takes more time or makes a larger value than it may. The message names the setting."""


@dataclass(slots=True)
class _Budget:
    """The limits of one rendering, and its use so far."""

    max_chars: int
    timeout_s: float
    ends_at: float = float("inf")
    num_steps: int = 0
    num_chars: int = 0


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def bounded(max_chars: int, timeout_s: float) -> Iterator[None]:
    """Bound compilation and rendering in this thread, inside the context, to so many characters and so much
    processor time. Filters of constants are called when a template is compiled.
    """
    held = _budget.set(_Budget(max_chars, timeout_s, time.thread_time() + timeout_s))
    try:
        yield
    except (RecursionError, MemoryError):
        raise TemplateLimit("it calls itself too deeply, or needs too much memory") from None
    finally:
        _budget.reset(held)


def _step(*_: object) -> _Budget:
    budget = _budget.get()
    budget.num_steps += 1
    if budget.num_steps % _LOOK_EVERY == 0:
        _look(budget)
    return budget


def _look(budget: _Budget) -> None:
    if time.thread_time() > budget.ends_at:
        raise TemplateLimit(
            f"it takes more than {budget.timeout_s:g} s of processor time (chat.template_timeout_s)"
        )


def _check(size: int) -> None:
    most = _budget.get().max_chars
    if size > most:
        raise TemplateLimit(f"it makes more than {most} characters (chat.max_rendered_chars)")


def _checked(value: Any) -> Any:
    """Return a value that a step has made, if it is small enough. A text is measured immediately."""
    if isinstance(value, str):
        _check(len(value))
    elif isinstance(value, int):
        _check_bits(value.bit_length())
    else:
        _check(_size(value))
    return value


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise TemplateLimit(f"it makes a number of more than {_MAX_BITS} bits")


def _check_width(*values: object) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise TemplateLimit(f"it asks for a width or a count above {_MAX_WIDTH}")


def _size(value: Any) -> int:
    """Return how many characters a value has, with all values in it, each as often as it occurs. Counting stops
    above the bound, so it also ends for a value that contains itself.
    """
    budget = _budget.get()
    size, count, stack = 0, 0, [value]
    while stack and size <= budget.max_chars:
        one = stack.pop()
        size += _ENTRY
        count += 1
        if count % _LOOK_AFTER == 0:
            _look(budget)
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            stack += one.keys()
            stack += one.values()
        elif isinstance(one, list | tuple | set | frozenset | ItemsView | ValuesView):
            stack += one
        elif isinstance(one, Namespace):
            stack += _fields(one).values()
    return size


def _fields(namespace: Namespace) -> dict[str, Any]:
    return object.__getattribute__(namespace, "_Namespace__attrs")  # type: ignore[no-any-return]


# --- operations whose results may be larger than their inputs ------------------------------------------------


def _of_join(value: Any, sep: Any = "", attribute: Any = None) -> None:
    if isinstance(value, Sequence):
        _check(_size(value) + len(value) * len(str(sep)))


def _of_replace(text: Any, old: Any, new: Any, count: Any = None) -> None:
    text, old, new = str(text), str(old), str(new)
    _check(len(text) + text.count(old) * len(new))


def _of_width(text: Any, width: Any = 0, *fill: Any, **more: Any) -> None:
    _check_width(width)


def _of_indent(text: Any, *args: Any, **more: Any) -> None:
    """Measure the text that is put at the beginning of each line."""
    given = (*args, *more.values())
    _check_width(*given)
    added = sum(len(one) if isinstance(one, str) else one for one in given if isinstance(one, str | int))
    text = str(text)
    _check(len(text) + (text.count("\n") + 1) * added)


def _of_json(value: Any, *args: Any, indent: Any = None, **more: Any) -> None:
    given = (*args, indent)
    if any(isinstance(one, int) and one > 16 for one in given) or any(
        isinstance(one, str) and len(one) > 16 for one in given
    ):
        raise TemplateLimit("it indents JSON by more than 16 blanks")


def _of_format(text: Any, *args: Any, **more: Any) -> None:
    text = str(text)
    if _WIDE.search(text):
        raise TemplateLimit("it formats with a width that is huge or comes from a value")
    _check(len(text) * 2 + _size([*args, *more.values()]))


def _of_parts(value: Any, count: Any, *fill: Any, **more: Any) -> None:
    _check_width(count)


def _of_digits(value: Any, precision: Any = 0, *_: Any, **more: Any) -> None:
    if isinstance(precision, int) and abs(precision) > 100:
        raise TemplateLimit("it rounds to more than 100 digits")


def _refused(*_: Any, **more: Any) -> None:
    raise SecurityError("this filter or method is not supported in chat templates")


_MULTIPLYING: Mapping[str, Callable[..., None]] = {
    "join": _of_join, "replace": _of_replace, "center": _of_width, "indent": _of_indent, "format": _of_format,
    "tojson": _of_json, "batch": _of_parts, "slice": _of_parts, "round": _of_digits,
    **dict.fromkeys(("wordwrap", "urlize", "xmlattr", "pprint"), _refused),
}  # fmt: skip
"""Filters of which a small argument may make much."""
_OF_TEXT: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _of_width),
    "replace": _of_replace, "join": lambda sep, parts=(): _of_join(parts, sep),
    **dict.fromkeys(("translate", "maketrans", "encode", "format_map"), _refused),
}  # fmt: skip
"""Methods of texts of which a small argument may make much."""
_BUILT_IN = (str, bytes, int, float, list, tuple, dict)
_HARMLESS_TYPES = (str, list, tuple, dict)
"""Types whose other methods return no more than their inputs."""


def _filter(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is a step, and whose result is bounded."""
    estimate = _MULTIPLYING.get(name)
    num_passed = 1 if hasattr(work, "jinja_pass_arg") else 0

    @wraps(work)  # with the attribute by which the context is passed
    def run(*args: Any, **named: Any) -> Any:
        _step()
        if estimate is not None:
            estimate(*args[num_passed:], **named)
        return _checked(work(*args, **named))

    return run


def _joined(parts: Sequence[Any]) -> str:
    texts = [part if isinstance(part, str) else str(_checked(part)) for part in parts]
    _check(sum(map(len, texts)))
    return "".join(texts)


def _finalized(value: Any) -> Any:
    """Count a value that is put into the text."""
    if not isinstance(value, str):
        if isinstance(value, Undefined):
            return value  # It is empty, or raises an error that names the missing value.
        value = str(_checked(value))
    budget = _step()
    budget.num_chars += len(value)
    if budget.num_chars > budget.max_chars:
        _check(budget.num_chars)
    return value


class _Counting(NodeTransformer):
    """Counts each turn of a loop as a step, and measures each array, object and joined text."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Begin each turn with a step."""
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, nodes.Const(None)), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Join texts by a function that measures them first."""
        self.generic_visit(node)
        return _call(_JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Measure an array."""
        return self._made(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Measure an object."""
        return self._made(node, [pair.value for pair in node.items])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Measure a tuple, unless it has the names that are assigned to."""
        return self._made(node, node.items) if node.ctx == "load" else node

    def _made(self, node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in items) else _call(_MADE, node)


def _call(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds. `bound` makes one of the sandbox that transformers compiles templates in."""

    intercepted_binops = frozenset({"*", "+", "**", "%"})

    @classmethod
    def bound(cls, environment: Any) -> BoundedEnvironment:
        """Give an environment these bounds, once."""
        if isinstance(environment, cls):
            return environment
        environment.__class__ = cls
        environment.filters = {name: _filter(name, work) for name, work in environment.filters.items()}
        environment.filters |= {_TICK: _step, _MADE: _checked, _JOINED: _joined}
        environment.globals.pop("lipsum", None)
        environment.finalize = _finalized
        environment.concat = _joined
        return environment  # type: ignore[no-any-return]

    def _generate(self, source: nodes.Template, *args: Any, **named: Any) -> Any:
        return super()._generate(_Counting().visit(source), *args, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be larger than its operands."""
        budget = _step()
        if operator == "+" and type(left) is str and type(right) is str:  # nearly always
            if len(left) + len(right) > budget.max_chars:
                _check(len(left) + len(right))
            return left + right
        if operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(max(left.bit_length(), 1) * max(right, 0))
        elif operator == "%" and isinstance(left, str):
            _of_format(left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        """Call a function or a method."""
        _step()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, _BUILT_IN) and not isinstance(owner, type):
            _check_method(owner, name, args, named)
        return _checked(super().call(__context, __obj, *args, **named))

    def wrap_str_format(self, value: Any) -> Any:
        """Return `str.format` with bounds."""
        work = super().wrap_str_format(value)
        if work is None:
            return None

        def run(*args: Any, **named: Any) -> Any:
            _of_format(value.__self__, *args, **named)
            return work(*args, **named)

        return run


def _check_method(owner: Any, name: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if isinstance(owner, str):
        estimate = _OF_TEXT.get(name)
        if estimate is not None:
            estimate(owner, *args, **named)
    elif not isinstance(owner, _HARMLESS_TYPES):
        _refused()


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length() - 1)
        return
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            _check((len(value) if isinstance(value, str | bytes) else _size(value)) * max(count, 0))
