"""Compiles the native kernels where there is a compiler; all else about the package is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
KERNELS = runpy.run_path(str(ROOT / "engine/kernels/build.py"))
LIBRARY: Path = KERNELS["LIBRARY"].relative_to(ROOT)


class BuildWithKernels(build_py):
    """Python sources, and the shared library that they load with ctypes: it is tied to no version of Python."""

    def library(self) -> Path:
        """Return the path at which the library is built."""
        return (ROOT if self.editable_mode else Path(self.build_lib).absolute()) / LIBRARY

    def run(self) -> None:
        """Build the package. If the library cannot be compiled, warn and continue without it."""
        super().run()
        if missing := KERNELS["build"](self.library()):
            self.warn(f"the native CPU kernels: {missing}")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the outputs, including the library and its log if they exist."""
        built = (self.library(), self.library().with_suffix(".log"))
        return [*super().get_outputs(include_bytecode), *(str(path) for path in built if path.exists())]


class TaggedWheel(bdist_wheel):
    """A wheel for one platform if it contains the library, else for any; in both cases for every Python 3."""

    def run(self) -> None:
        """Build first, because the wheel's name depends on whether there is a library."""
        self.run_command("build")
        is_native = self.get_finalized_command("build_py").library().exists()
        self.distribution.has_ext_modules = lambda: is_native
        self.root_is_pure = not is_native
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": TaggedWheel})
