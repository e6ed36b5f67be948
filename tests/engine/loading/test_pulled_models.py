"""Where the files of pulled models lie, and what is said of one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import ModelLoadError
from engine.model_files.model_directory import local_model, resolve_model
from engine.model_files.pulled_models import place_of, pulled_folder

NAME = "smollm2-135m"


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RAYDIX_CACHE": "/r", "XDG_CACHE_HOME": "/x"}, "/r/models"),
        ({"RAYDIX_CACHE": "~/r"}, "/h/r/models"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/raydix/models"),
        ({"XDG_CACHE_HOME": "x"}, "/h/.cache/raydix/models"),
        ({}, "/h/.cache/raydix/models"),
    ],
)
def test_the_folder_is_the_cache_of_raydix_or_of_the_user(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    monkeypatch.setenv("HOME", "/h")
    for name in ("RAYDIX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pulled_folder() == Path(place)


def test_a_name_stands_for_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYDIX_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=f"{NAME} is not on this machine .*`raydix pull {NAME}`"):
        resolve_model(NAME)
    place_of(NAME).parent.mkdir()
    place_of(NAME).touch()
    assert resolve_model(NAME) == local_model(NAME) == place_of(NAME)
    assert place_of(NAME).suffix == ".gguf"
    with pytest.raises(ModelLoadError, match="no model on the hub"):
        local_model(NAME, revision="main")
    with pytest.raises(ModelLoadError, match=f"`raydix pull` knows .*{NAME}"):
        local_model("smollm3-135m")
