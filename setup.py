"""Compiles the native kernels where there is a compiler; all else about the package is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

BUILD = runpy.run_path(str(Path(__file__).parent / "engine/kernels/build.py"))


class BuildKernels(build_ext):
    """A shared library that Python loads with ctypes: no module, so neither name nor flags are a module's."""

    def get_ext_filename(self, fullname: str) -> str:
        """Beside build.py."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile, or say why not and go on without."""
        try:
            left_out = BUILD["build"](Path(self.get_ext_fullpath(ext.name)))
        except BUILD["BuildError"] as error:
            self.warn(f"Raydix is installed without its native CPU kernels: {error}")
            return
        for reason in left_out:
            self.warn(f"left out: {reason}")

    def get_outputs(self) -> list[str]:
        """What is there to be packaged."""
        return [path for path in super().get_outputs() if Path(path).exists()]


sources = sorted(str(path) for path in Path("engine/kernels/native").glob("*.c"))
setup(
    ext_modules=[Extension("engine.kernels.libraydix", sources, optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
