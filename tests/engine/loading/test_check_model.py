"""What a start would find wrong with a model's files is found without one, in the words of the loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.base.errors import ModelLoadError
from engine.loading.check_model import check_model
from engine.model_files.model_directory import demo_model_path, resolve_model
from engine.settings.config import EngineConfig
from engine.settings.drafting import Speculation
from tests.engine.support.model_hub import ModelHub, model_hub


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model, for a test to spoil."""
    return Path(shutil.copytree(demo_model_path(), tmp_path / "model"))


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lengthen(model: Path) -> None:
    with (model / "model.safetensors").open("ab") as weights:
        weights.write(b"x")


def widen(model: Path) -> None:
    change(model, hidden_size=2 * read(model)["hidden_size"], head_dim=read(model).get("head_dim", 64))


def remove(model: Path, names: str) -> None:
    for path in model.glob(names):
        path.unlink()


def read(model: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / "config.json").read_text())
    return found


def change(model: Path, **keys: object) -> None:
    (model / "config.json").write_text(json.dumps({**read(model), **keys}))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (truncate, "not a complete safetensors file"),
    "longer weights": (lengthen, "not a complete safetensors file"),
    "no weights": (lambda model: remove(model, "model.safetensors"), "no weights in .*: none are there"),
    "weights of another shape": (widen, "config.json"),
    "no config": (lambda model: remove(model, "config.json"), "config.json"),
    "a config that is no JSON": (lambda model: (model / "config.json").write_text("{"), "config.json"),
    "an unknown architecture": (lambda model: change(model, architectures=["FooForCausalLM"]), "FooForCausalLM"),
    "a key nobody knows": (lambda model: change(model, logit_warp=2.0), "logit_warp"),
    "no tokenizer": (lambda model: remove(model, "token*"), "no usable tokenizer"),
    "a tokenizer that is no JSON": (
        lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer.json is not readable JSON"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILT)
def test_a_model_that_the_loader_would_refuse_is_refused(kind: str, model: Path) -> None:
    spoil, message = SPOILT[kind]
    check_model(EngineConfig(model=str(model)))
    spoil(model)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(model=str(model)))


@pytest.mark.parametrize("name", ["/nonexistent/model", "./nowhere", "nowhere", "a/b/c", "~/nowhere-at-all"])
def test_a_directory_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"there is no directory {name}"):
        check_model(EngineConfig(model=name))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        check_model(EngineConfig(model=str(tmp_path)))


def test_a_context_longer_than_the_model_s_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len is 1000000"):
        check_model(EngineConfig(model=str(model), max_model_len=1_000_000))


def test_a_model_that_ranks_cannot_share_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 7"):
        check_model(EngineConfig(model=str(model), tensor_parallel_size=7))


def test_the_draft_model_is_checked_too(model: Path) -> None:
    drafts = Speculation("draft_model", model=str(model))
    check_model(EngineConfig(model="demo", speculation=drafts))
    truncate(model)
    with pytest.raises(ModelLoadError, match="not a complete safetensors file"):
        check_model(EngineConfig(model="demo", speculation=drafts))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelHub]:
    with model_hub(monkeypatch, tmp_path / "cache") as made:
        yield made


ON_HUB = {
    kind: (spoil, message)
    for kind, (spoil, message) in SPOILT.items()
    if kind not in ("truncated weights", "longer weights", "weights of another shape") and "no JSON" not in kind
}


@pytest.mark.parametrize("kind", ON_HUB)
def test_a_model_on_the_hub_that_the_loader_would_refuse_is_refused(kind: str, model: Path, hub: ModelHub) -> None:
    hub.models["someone/model"] = model
    check_model(EngineConfig(model="someone/model"))
    asked = [path for path in hub.asked if "/resolve/" in path]
    assert asked and not [path for path in asked if "safetensors" in path or "tokenizer" in path]
    hub.models["someone/spoilt"] = model
    spoil, message = ON_HUB[kind]
    spoil(model)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(model="someone/spoilt"))


def test_a_model_that_is_not_on_the_hub_is_refused(model: Path, hub: ModelHub) -> None:
    hub.models["someone/model"] = model
    with pytest.raises(ModelLoadError, match="nobody/has-this-model is neither a directory here nor a model on"):
        check_model(EngineConfig(model="nobody/has-this-model"))
    with pytest.raises(ModelLoadError, match="has no revision 'v9' on the hub"):
        check_model(EngineConfig(model="someone/model", model_revision="v9"))
    drafts = Speculation("draft_model", model="nobody/has-this-model")
    with pytest.raises(ModelLoadError, match="nobody/has-this-model is neither"):
        check_model(EngineConfig(model="someone/model", speculation=drafts))
    hub.models["someone/gated"] = model
    hub.gated.add("someone/gated")
    with pytest.raises(ModelLoadError, match="someone/gated is gated: accept its terms on the hub"):
        check_model(EngineConfig(model="someone/gated"))


def test_a_hub_that_cannot_be_reached_is_an_error_unless_all_of_the_model_is_here(
    model: Path, hub: ModelHub
) -> None:
    """As it is for an engine on this machine."""
    hub.models.update({"someone/model": model, "someone/half": model, "someone/other": model})
    resolve_model("someone/model")
    check_model(EngineConfig(model="someone/half"))  # which leaves its description in the cache
    hub.close()
    check_model(EngineConfig(model="someone/model"))
    with pytest.raises(ValueError, match="max_model_len is 1000000"):
        check_model(EngineConfig(model="someone/model", max_model_len=1_000_000))
    for lacking in ("someone/half", "someone/other"):
        with pytest.raises(ModelLoadError, match=f"{lacking} is not a directory here, not in the local hub cache"):
            check_model(EngineConfig(model=lacking))
