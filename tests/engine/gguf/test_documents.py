"""A GGUF file stands for a model wherever a directory of files does: for readers, in names, for fingerprints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import ModelLoadError
from engine.gguf.documents import is_gguf
from engine.loading.check_model import check_model
from engine.model_config.tasks import tasks_of
from engine.model_files.json_files import read_json, read_object
from engine.model_files.model_directory import (
    fingerprint,
    gguf_on_hub,
    hub_commit,
    local_model,
    resolve_metadata,
    resolve_model,
)
from engine.settings.config import EngineConfig
from engine.settings.generation_defaults import generation_defaults, unused_recommendations
from engine.text.end_tokens import end_tokens, tokenizer_end
from tests.engine.support.gguf_tokenizers import gpt2_metadata, write

CONFIG = {
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
}
METADATA = gpt2_metadata("qwen2") | CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(METADATA, tmp_path / "model.gguf")


def test_its_metadata_give_the_end_tokens_and_the_sampling_defaults(tmp_path: Path) -> None:
    """Numbers are the decimals that were meant, not the 32 bits in which they are stored."""
    sampling = {"top_k": 20, "top_p": 0.95, "temp": 0.6, "penalty_repeat": 1.05, "mirostat": 2}
    stated = {f"general.sampling.{name}": value for name, value in sampling.items()}
    model = write(METADATA | stated, tmp_path / "model.gguf")
    recommended = {"top_k": 20, "top_p": 0.95, "temperature": 0.6, "repetition_penalty": 1.05}
    assert generation_defaults("model", model) == recommended
    assert unused_recommendations(model) == ["mirostat"]
    assert end_tokens(read_object(model / "generation_config.json")) == {0, 2}
    assert tokenizer_end(model) is None  # it says nothing that is not said there


def test_a_model_without_recommendations_has_none(model: Path) -> None:
    assert generation_defaults("model", model) == {} and unused_recommendations(model) == []


def test_documents_that_do_not_follow_from_the_file_are_missing(model: Path) -> None:
    assert read_json(model / "special_tokens_map.json") is None
    assert read_json(model / "1_Pooling/other.json") is None


def test_a_file_that_changes_is_read_again(model: Path) -> None:
    assert generation_defaults("model", model) == {}
    os.utime(write({**METADATA, "general.sampling.top_k": 9}, model), ns=(1, 1))
    assert generation_defaults("model", model) == {"top_k": 9}


@pytest.mark.parametrize(("pooling", "tasks"), [(None, ("generate",)), (0, ("generate",)), (3, ("embed",))])
def test_the_tasks_follow_from_the_pooling_type(
    tmp_path: Path, pooling: int | None, tasks: tuple[str, ...]
) -> None:
    stated = {} if pooling is None else {"llama.pooling_type": pooling}
    assert tasks_of("auto", write(METADATA | stated, tmp_path / "model.gguf")) == tasks


@pytest.mark.parametrize(
    ("pooling", "message"),
    [(1, "pooling of embeddings is mean"), (4, "pooling of embeddings is rank"), (9, "is 9; expected 0 to 4")],
)
def test_a_kind_of_embeddings_that_is_not_known_is_refused(tmp_path: Path, pooling: int, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tasks_of("auto", write({**METADATA, "llama.pooling_type": pooling}, tmp_path / "model.gguf"))


def test_an_error_in_the_file_is_reported_by_all_readers(tmp_path: Path) -> None:
    model = write({**METADATA, "tokenizer.ggml.model": "other"}, tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match="the tokenizer 'other'"):
        read_object(model / "generation_config.json")


def test_a_path_to_a_file_or_to_its_directory_names_it(model: Path) -> None:
    assert resolve_model(str(model)) == local_model(str(model.parent)) == resolve_metadata(str(model)) == model
    assert is_gguf(model) and not is_gguf(model.parent)


def test_a_directory_with_safetensors_is_used_as_before(model: Path) -> None:
    (model.parent / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(model.parent)) == model.parent


def test_a_directory_with_several_models_is_refused(model: Path) -> None:
    other = shutil.copy(model, model.with_name("other.gguf"))
    with pytest.raises(ModelLoadError, match=r"holds 2 models in GGUF, .*model\.gguf, other\.gguf; name the file"):
        resolve_model(str(model.parent))
    assert resolve_model(str(other)) == other


@pytest.mark.parametrize("name", ["weights.bin", "nothing.gguf"])
def test_a_path_that_is_no_model_is_named(tmp_path: Path, name: str) -> None:
    if name == "weights.bin":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"expected .*a file in GGUF \(\*\.gguf\)"):
        resolve_model(str(tmp_path / name))


def test_the_fingerprint_is_of_all_metadata_and_not_of_the_name(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    assert fingerprint(model) == fingerprint(copy) != fingerprint(model, "int8")
    other = {**METADATA, "tokenizer.ggml.tokens": [*METADATA["tokenizer.ggml.tokens"][:-1], "§" * 6]}
    assert fingerprint(write(other, tmp_path / "other.gguf")) != fingerprint(model)


def test_a_commit_of_the_hub_is_part_of_its_fingerprint(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--o--n/snapshots/abc/Q4"
    snapshot.mkdir(parents=True)
    copy = Path(shutil.copy(model, snapshot))
    assert hub_commit(copy) == "abc" and hub_commit(model) is None
    assert fingerprint(copy) != fingerprint(model)


class Hub:
    """A hub whose repositories have these files, of which it sends what is asked for."""

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self._folder, self._files = folder, files
        self.asked: list[Any] = []

    def list_repo_files(self, repository: str, revision: str | None = None) -> list[str]:
        self.asked.append(repository)
        return list(self._files)

    def snapshot_download(self, repository: str, *, allow_patterns: list[str], **_options: Any) -> str:
        self.asked.append((repository, allow_patterns))
        for name in set(allow_patterns) & self._files.keys():
            (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self._files[name], self._folder / name)
        return str(self._folder)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(tmp_path / "snapshot", {"Q4/model.gguf": model, "README.md": model})
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    monkeypatch.setattr("huggingface_hub.snapshot_download", found.snapshot_download)
    return found


def test_a_file_on_the_hub_is_named_with_its_repository(hub: Hub, tmp_path: Path) -> None:
    """Nothing else of the repository is downloaded."""
    assert local_model("owner/name/Q4/model.gguf") is None
    assert resolve_model("owner/name/Q4/model.gguf") == tmp_path / "snapshot/Q4/model.gguf"
    assert hub.asked == [("owner/name", ["Q4/model.gguf"])]
    with pytest.raises(ModelLoadError, match=r"there is no Q8/model\.gguf in owner/name on the hub"):
        resolve_model("owner/name/Q8/model.gguf")


def test_a_check_looks_only_for_the_names_of_files_on_the_hub(hub: Hub) -> None:
    check_model(EngineConfig(model="owner/name/Q4/model.gguf"))
    with pytest.raises(ModelLoadError, match=r"has no model\.gguf; its files in GGUF are: Q4/model\.gguf"):
        check_model(EngineConfig(model="owner/name/model.gguf"))
    with pytest.raises(ModelLoadError, match=r"has no x-00001-of-00002\.gguf"):
        gguf_on_hub("owner/name/x-00002-of-00002.gguf")
    assert hub.asked == ["owner/name"] * 3
