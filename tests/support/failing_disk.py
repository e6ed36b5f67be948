"""A directory whose disk fails: what reads or writes there gets the error that the kernel would give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def failing_disk(directory: Path, number: int, *, reads: bool = False) -> Iterator[None]:
    """Have what creates or opens for writing below `directory` fail with an errno; with `reads`, what reads."""

    def fails(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(directory)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            target = args[0] if args and isinstance(args[0], str | os.PathLike) else path
            is_opened = real is real_open
            is_meant = not is_opened or bool(args[0] & _WRITING) != reads
            if is_meant and (fails(path) or fails(target)):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        return call

    real_open = os.open
    names = ("open",) if reads else ("open", "mkdir", "link", "replace", "rename")
    patches = [patch.object(os, name, failing(getattr(os, name))) for name in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
