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
        """Where it is built."""
        return (ROOT if self.editable_mode else Path(self.build_lib).absolute()) / LIBRARY

    def run(self) -> None:
        """Go on without the library where it cannot be compiled, and say so."""
        super().run()
        if missing := KERNELS["build"](self.library()):
            self.warn(f"the native CPU kernels: {missing}")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """With the library and its log, where there are any."""
        built = (self.library(), self.library().with_suffix(".log"))
        return [*super().get_outputs(include_bytecode), *(str(path) for path in built if path.exists())]


class TaggedWheel(bdist_wheel):
    """For one platform when it carries the library, for any when it does not; for every Python either way."""

    def run(self) -> None:
        """Build first: the name depends on what there is."""
        self.run_command("build")
        is_native = self.get_finalized_command("build_py").library().exists()
        self.distribution.has_ext_modules = lambda: is_native
        self.root_is_pure = not is_native
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": TaggedWheel})
