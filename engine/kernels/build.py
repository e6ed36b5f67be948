"""Compile the native kernels: every kernel once per element type and instruction set, into one shared library.

    python engine/kernels/build.py [--sanitize] [-o FILE]

The package's build runs this too, and goes on without the library where there is no compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
_SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512")
_ISAS = {
    "generic": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
"""Flags of each instruction set, the best last. An ARM processor's vectors are part of its generic set."""


class BuildError(Exception):
    """The library cannot be compiled here; says why."""


def build(output: Path = LIBRARY, sanitize: bool = False) -> list[str]:
    """Compile with $CC, or the first of cc, gcc and clang. Returns what was left out, and why.

    Raises BuildError when there is no compiler, or it cannot compile even the generic kernels.
    """
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        raise BuildError("no C compiler was found (cc, gcc, clang, or the one $CC names)")
    command = [*compiler.split(), *_FLAGS, *(_SANITIZE if sanitize else ())]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        units = list(_units())
        targets = [str(Path(folder, f"{number}.o")) for number in range(len(units))]
        failures = list(pool.map(lambda unit, to: _run([*command, *unit, "-o", to]), units, targets))
        for unit, failure in zip(units, failures, strict=True):
            if failure and ("-DISA=generic" in unit or "-c" in unit[:1]):
                raise BuildError(f"{' '.join(command)} cannot compile {unit[-1]}: {failure}")
        objects = [target for target, failure in zip(targets, failures, strict=True) if not failure]
        linked = Path(folder, output.name)
        failure = _run([*command, "-shared", *objects, "-o", str(linked), "-lm"])
        if failure:
            raise BuildError(f"{compiler} cannot link the kernels: {failure}")
        output.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old library mapped keeps it.
        replacement = output.with_suffix(".new")
        shutil.copy(linked, replacement)
        replacement.replace(output)
    return [f"{' '.join(unit[:-1])}: {failure}" for unit, failure in zip(units, failures, strict=True) if failure]


def _units() -> Iterator[list[str]]:
    """What the compiler is asked for, beside the flags of all."""
    yield ["-c", str(SOURCES / "cpu.c")]
    isas = _ISAS if platform.machine() in ("x86_64", "AMD64") else {"generic": ()}
    for isa, flags in isas.items():
        for elements in ([], ["-DRAYDIX_BF16"]):
            if elements or isa not in ("avx512_bf16", "amx"):  # which add nothing to float32
                yield [*elements, f"-DISA={isa}", *flags, "-c", str(SOURCES / "all.c")]


def _run(command: list[str]) -> str:
    """ "" or what the compiler complains about."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return "; ".join(lines[:3]) or f"exit status {done.returncode}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=LIBRARY, help="the library (%(default)s)")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined sanitizers")
    arguments = parser.parse_args()
    try:
        left_out = build(arguments.output, arguments.sanitize)
    except BuildError as error:
        print(f"The native kernels were not built: {error}", file=sys.stderr)
        return 1
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
