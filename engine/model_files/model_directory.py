"""Finds a model's files: in a directory, in a GGUF file, in this package, among those that `raydix pull` has
downloaded, or on the Hugging Face hub.

The result is a path that stands for the model: that of the directory with its files, or of its only or first GGUF
file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from engine.base.errors import ModelLoadError
from engine.base.files import checked, open_regular, read_bytes
from engine.gguf.documents import is_gguf
from engine.gguf.files import SUFFIX, first_files, part_names, read_model
from engine.model_files.json_files import MAX_JSON_BYTES, read_json
from engine.model_files.pulled_models import PULLED_MODELS, pulled_model
from engine.model_files.weight_files import PICKLED, lacks_safetensors

_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")
"""Files that are downloaded: never code. `PICKLED` ones are only if there are no safetensors."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_READ_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
_UNWANTED = ("consolidated*", "original/*")
"""Files with the same weights in their makers' own layout."""
_DESCRIPTION, _TOKENIZER = "*.json", ("tokenizer*", "vocab*", "merges*", "added_tokens*", "special_tokens*")
"""Files that describe a model, without those of its tokenizer, which are large."""
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 16 * 1024
"""Number and bytes of samples of each weight file, for the fingerprint."""


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Return the directory or GGUF file of `model`: "demo", a name of `PULLED_MODELS`, a local path, or a hub id
    ("owner/name", or "owner/name/FILE.gguf") to download.

    `revision` is a commit, a tag or a branch of a hub id; None takes the newest. Raises ModelLoadError.
    """
    local = local_model(model, revision)
    if local is not None:
        return local
    repository, file = _gguf_on_hub(model)
    if file is None:
        return _downloaded_model(model, revision)
    return _downloaded_gguf(model, repository, file, revision)


def _downloaded_model(model: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    directory = _download(model, revision, local_files_only=local_files_only)
    if lacks_safetensors(directory):
        commit = hub_commit(directory) or revision
        _download(model, commit, PICKLED, (), local_files_only=local_files_only)
    return directory


def _gguf_on_hub(model: str) -> tuple[str, str | None]:
    """Return the repository of a hub id, and the GGUF file that it names; None if it names none."""
    owner, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    return (f"{owner}/{name}", file) if file else (model, None)


def _downloaded_gguf(
    model: str, repository: str, file: str, revision: str | None, *, local_files_only: bool = False
) -> Path:
    names = part_names(file)
    directory = _download(repository, revision, [*map(_literal, names)], (), local_files_only=local_files_only)
    if missing := [name for name in names if not (directory / name).exists()]:
        raise ModelLoadError(
            f"{model}: there is no {missing[0]} in {repository} on the hub; look up how its GGUF files are called"
        )
    return directory / names[0]


def _literal(name: str) -> str:
    """Return the pattern that matches only this name."""
    return re.sub(r"[*?[]", lambda special: f"[{special[0]}]", name)


def local_model(model: str, revision: str | None = None) -> Path | None:
    """Return the path of `model` as `resolve_model` does, but None for a hub id. Raises ModelLoadError."""
    local = Path(model).expanduser()
    if revision is not None and (model == "demo" or model in PULLED_MODELS or local.exists()):
        raise ModelLoadError(
            f"model_revision is {revision!r}, but {model} is no model on the hub: leave it out, or name a hub id"
        )
    if model == "demo":
        return demo_model_path()
    if model in PULLED_MODELS:
        return pulled_model(model)
    if local.is_dir():
        check_files(local)
        return _gguf_in(local) or local
    if is_gguf(local):
        return local
    if local.exists():
        raise ModelLoadError(
            f"{model} is a file; expected the directory of a Hugging Face-style model, or a file in GGUF "
            f"(*{SUFFIX})"
        )
    is_hub_id = model.count("/") == 1 or (model.count("/") > 1 and model.endswith(SUFFIX))
    if local.is_absolute() or model.startswith((".", "~")) or not is_hub_id:
        raise ModelLoadError(
            f"there is no directory {model}; expected a model's directory, a file in GGUF (*{SUFFIX}), a hub id "
            f'such as Qwen/Qwen3-0.6B or OWNER/NAME/FILE{SUFFIX}, "demo" for the embedded model, or a name that '
            f"`raydix pull` knows ({', '.join(PULLED_MODELS)})"
        )
    return None


def _gguf_in(directory: Path) -> Path | None:
    """Return the GGUF file of a directory with one model in GGUF and no other weights; None if there is none.
    Raises ModelLoadError if there are several.
    """
    if any(directory.glob("*.safetensors")) or not (found := first_files(directory)):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise ModelLoadError(
            f"{directory} holds {len(found)} models in GGUF, but one was expected: {names}; name the file of one, "
            f"such as {found[0]}"
        )
    return found[0]


def described_on_hub(model: str, revision: str | None = None) -> tuple[Path, list[str] | None]:
    """Return a directory with the description of a model on the hub, and the names of the files there that an
    engine may read. Neither weights nor the tokenizer are downloaded.

    If the hub cannot be reached, the directory is the whole copy in the local cache, which an engine would then
    use, and the names are None. Raises ModelLoadError if the hub has no such model, or there is no copy.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import DEFAULT_REVISION

    wanted, unwanted = [_DESCRIPTION], [*_UNWANTED, *_TOKENIZER]
    try:
        found = HfApi().model_info(model, revision=revision or DEFAULT_REVISION)
    except Exception:  # Any error: if there is no copy, a small download reports it again.
        _download(model, revision, wanted, unwanted)
        return _downloaded_model(model, revision, local_files_only=True), None
    directory = _download(model, found.sha, wanted, unwanted)
    names = [file.rfilename for file in found.siblings or ()]
    return directory, [name for name in names if _fits(name, (*_WANTED, *PICKLED)) and not _fits(name, _UNWANTED)]


def gguf_on_hub(model: str, revision: str | None = None) -> Path | None:
    """Return the local cache's copy of a GGUF file on the hub ("owner/name/FILE.gguf"), which an engine uses if
    the hub cannot be reached; None if the hub has the file. Raises ModelLoadError if it has not.
    """
    from huggingface_hub import HfApi

    repository, file = _gguf_on_hub(model)
    assert file is not None, "the caller has checked"
    try:
        names = HfApi().list_repo_files(repository, revision=revision)
    except Exception:  # Any error: if there is no copy, the search for one reports it.
        return _downloaded_gguf(model, repository, file, revision, local_files_only=True)
    if missing := [name for name in part_names(file) if name not in names]:
        there = ", ".join(sorted(name for name in names if name.endswith(SUFFIX))[:8]) or "none"
        raise ModelLoadError(f"{repository} on the hub has no {missing[0]}; its files in GGUF are: {there}")
    return None


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_files(directory: Path) -> None:
    """Raise ModelLoadError unless all that we or a library read of a model are regular files of a usual size."""
    for path in _files_read(directory):
        max_bytes = None if path.suffix in _WEIGHT_SUFFIXES else MAX_JSON_BYTES
        if not path.name.startswith("."):
            try:
                checked(path, max_bytes)
            except OSError as error:
                raise ModelLoadError(
                    f"{path} cannot be read: it {error.strerror}; download the model again"
                ) from None


def resolve_metadata(model: str) -> Path:
    """Return a directory with the model's config.json, or its GGUF file. Only JSON files are downloaded.

    Raises ModelLoadError.
    """
    if local_model(model) is not None or _gguf_on_hub(model)[1] is not None:
        return resolve_model(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json"]))
    except Exception as error:
        raise ModelLoadError(
            f"{model} is not a directory here, and its config cannot be downloaded from the hub: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from None


def fingerprint(model: Path, quantization: str | None = None, kv_dtype: str = "auto") -> str:
    """Hash a model's configuration, tokenizer and chat templates, samples of its weight files, and how weights and
    KV are rounded.

    Models with the same fingerprint can continue each other's streams and use each other's KV. The samples are 1
    MiB of each weight file, in pieces so close together that a layer cannot change between them. The commit of a
    model from the hub is part of the fingerprint too. It has 32 hexadecimal digits and is equal for copies of one
    model on several machines.
    """
    rounded = (quantization or "") + ("" if kv_dtype == "auto" else f";kv={kv_dtype}")
    digest = hashlib.blake2b(rounded.encode(), digest_size=16)
    if (commit := hub_commit(model)) is not None:
        digest.update(f"commit:{commit};".encode())
    if is_gguf(model):
        for path, header_bytes in _gguf_headers(model):
            digest.update(f"gguf:{path.stat().st_size};".encode())
            for piece in (*_beginning(path, header_bytes), *_samples(path)):
                digest.update(piece)
        return digest.hexdigest()
    for path in _files_read(model):
        name = path.relative_to(model).as_posix()
        if path.suffix in _WEIGHT_SUFFIXES:
            digest.update(f"{name}:{path.stat().st_size};".encode())
            for piece in _samples(path):
                digest.update(piece)
        else:
            digest.update(f"{name}:".encode() + read_bytes(path, MAX_JSON_BYTES))
    return digest.hexdigest()


def _files_read(directory: Path) -> Iterator[Path]:
    """Yield the files that we or a library read of a model, in the same order on all machines: its own files,
    those of the modules that sentence-transformers names, and additional chat templates.
    """
    pickled = PICKLED if lacks_safetensors(directory) else ()
    there = directory.iterdir()
    yield from sorted(path for path in there if path.suffix in _READ_SUFFIXES or _fits(path.name, pickled))
    described = read_json(directory / "modules.json")
    modules = described if isinstance(described, list) else []
    places = {Path(str(module.get("path", ""))).name for module in modules if isinstance(module, dict)}
    yield from (path for place in sorted(places - {""}) if (path := directory / place / "config.json").exists())
    yield from sorted((directory / "additional_chat_templates").glob("*.jinja"))


def _gguf_headers(model: Path) -> Iterator[tuple[Path, int]]:
    """Yield each file of a model in GGUF, with the number of bytes before its tensors."""
    read = read_model(model)
    for path in read.paths:
        offsets = [tensor.offset for tensor in read.tensors.values() if tensor.path == path]
        yield path, min(offsets, default=path.stat().st_size)


def _beginning(path: Path, num_bytes: int) -> Iterator[bytes]:
    with open_regular(path) as file:
        while num_bytes > 0 and (piece := file.read(min(num_bytes, 2**20))):
            num_bytes -= len(piece)
            yield piece


def _samples(path: Path) -> Iterator[bytes]:
    """Yield pieces spread evenly over a file, or all of a file that is no longer than the pieces."""
    size = path.stat().st_size
    step = max(size // _NUM_SAMPLES, _SAMPLE_BYTES)
    with open_regular(path) as file:
        for start in range(0, size, step):
            yield os.pread(file.fileno(), _SAMPLE_BYTES, start)


def hub_commit(model: Path) -> str | None:
    """Return the commit of a model in the hub's cache (models--OWNER--NAME/snapshots/COMMIT); else None."""
    for path in (model, *model.parents) if is_gguf(model) else (model,):
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.name
    return None


def demo_model_path() -> Path:
    """Return the embedded model's directory. Raises ModelLoadError if it is not installed."""
    spec = find_spec("deployments")  # located without an import, because the engine does not depend on it
    for parent in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(parent) / "demo_model"
        if (directory / "config.json").exists():
            return directory
    raise ModelLoadError(
        "the embedded model is not installed: expected deployments/demo_model; name another model, "
        "or install Raydix with its package data"
    )


def _download(
    model: str,
    revision: str | None,
    wanted: Sequence[str] = _WANTED,
    unwanted: Sequence[str] = _UNWANTED,
    *,
    local_files_only: bool = False,
) -> Path:
    from huggingface_hub import snapshot_download  # imported only for downloads, because it takes a second
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(unwanted),
                local_files_only=local_files_only,
            )
        )
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{model} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{model} is neither a directory here nor a model on the hub; check the spelling, "
            "or set HF_TOKEN if the model is private"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(
            f"{model} has no revision {revision!r} on the hub: give a commit, a tag or a branch of it as "
            "model_revision"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelLoadError(
            f"{model} is not a directory here, not in the local hub cache, and cannot be downloaded "
            f"({type(error).__name__}: {error}); check the network, or give the directory of a copy"
        ) from error
