"""Compiles the native kernels, each once per element type and instruction set, into one shared library.

    python -m engine.kernels.build [--sanitizer address|thread] [-o FILE]

The package's build runs this too, and continues without the library if it cannot be compiled. A `.log` next to the
library says what is missing and why. This file needs only Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"
LIBRARY = Path(__file__).parent / "libraydix.so"

_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror=implicit",
)
_SANITIZERS = {
    "address": (
        "-O1",
        "-g",
        "-fno-omit-frame-pointer",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ),
    "thread": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=thread"),
}
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512")
_ISAS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
"""Compiler flags of each instruction set, the best last. ARM's vectors are part of its generic set."""


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


class _Unit(NamedTuple):
    """One call of the compiler."""

    name: str
    flags: tuple[str, ...]
    source: Path


def build(output: Path = LIBRARY, sanitizer: str = "", also: Sequence[Path] = ()) -> str:
    """Compile the kernels, and the sources `also`, into `output`. Return what is missing and why, or "".

    Instruction sets that the compiler does not support are omitted. Without a compiler, or if not even the generic
    kernels compile, an existing library is removed.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    log = output.with_suffix(".log")
    try:
        missing = "\n".join(_compile(output, sanitizer, also))
    except BuildError as error:
        output.unlink(missing_ok=True)
        missing = f"not built: {error}"
    log.unlink(missing_ok=True)
    if missing:
        log.write_text(missing + "\n", encoding="utf-8")
    return missing


def _compile(output: Path, sanitizer: str, also: Sequence[Path]) -> list[str]:
    """Compile and link; return the omitted parts and why. Raises BuildError."""
    compiler = _compiler()
    command = [*compiler, *_FLAGS, *_SANITIZERS.get(sanitizer, ())]
    units = [*_units(), *(_Unit(path.stem, (), path) for path in also)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder, f"{number}.o")) for number in range(len(units))]
        calls = [
            [*command, *unit.flags, "-c", str(unit.source), "-o", to]
            for unit, to in zip(units, objects, strict=True)
        ]
        failures = dict(zip(units, pool.map(_run, calls), strict=True))
        for unit, failure in failures.items():
            if failure and not unit.name.startswith(tuple(list(_ISAS)[1:])):
                hint = (
                    " (it has no OpenMP: install it, or gcc)" if "openmp" in failure or "omp.h" in failure else ""
                )
                raise BuildError(f"{shlex.join(compiler)} cannot compile {unit.source.name}: {failure}{hint}")
        linked = Path(folder, output.name)
        compiled = [to for to in objects if Path(to).exists()]
        # gcc's code uses torch's OpenMP library under any file name: native.py loads it first.
        is_gcc = sys.platform == "linux" and "Free Software Foundation" in _version(compiler)
        linker = [word for word in command if not is_gcc or word != "-fopenmp"]
        failure = _run([*linker, "-shared", *compiled, "-o", str(linked), "-lm"])
        if failure:
            raise BuildError(f"{shlex.join(compiler)} cannot link the kernels: {failure}")
        # Replace the file instead of overwriting it: processes that have the old library mapped keep it.
        replacement = output.with_suffix(".new")
        shutil.copy(linked, replacement)
        replacement.replace(output)
    left_out = [f"{unit.name} left out: {failure}" for unit, failure in failures.items() if failure]
    if sys.platform == "linux" and not is_gcc:
        left_out.append("the kernels have their own threads besides torch's: OpenMP is not gcc's; prefer gcc")
    return left_out


def _compiler() -> list[str]:
    """Return $CC or the first compiler found: gcc before others, because torch's OpenMP is usually gcc's."""
    if words := shlex.split(os.environ.get("CC", "")):
        return words
    for name in ("gcc", "cc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "no C compiler was found (gcc, cc, clang, or the one that $CC names); install one such as gcc"
    )


def _version(compiler: list[str]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace").stdout


def _units() -> list[_Unit]:
    units = [_Unit(name, (), SOURCES / f"{name}.c") for name in ("cpu", "cascade", "pages")]
    for isa, flags in _ISAS.items() if platform.machine() in ("x86_64", "AMD64") else [("generic", ())]:
        if isa not in ("avx512_bf16", "amx"):  # These instructions do not help float32.
            units.append(_Unit(f"{isa} (float32)", (f"-DISA={isa}", *flags), SOURCES / "all.c"))
        units.append(_Unit(f"{isa} (bfloat16)", (f"-DISA={isa}", "-DRAYDIX_BF16", *flags), SOURCES / "all.c"))
    return units


def _run(command: list[str]) -> str:
    """Run the compiler; return its errors, or "" if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return "; ".join(lines[:3]) or f"exit status {done.returncode}"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=LIBRARY, help="the library (%(default)s)")
    parser.add_argument("--sanitizer", choices=_SANITIZERS, default="", help="compile with it, for tests")
    parser.add_argument("--also", type=Path, action="append", default=[], help="a C source that belongs to a test")
    arguments = parser.parse_args()
    missing = build(arguments.output, arguments.sanitizer, arguments.also)
    if missing:
        print(f"The native kernels:\n{missing}", file=sys.stderr)
    return 0 if arguments.output.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
