"""The tasks that a model serves: answers, embeddings, or scores of documents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from engine.base.errors import ModelLoadError
from engine.model_config.encoder import EncoderConfig, encoder_of
from engine.model_files.json_files import read_json, read_object
from engine.values.sampling_params import SamplingParams

Task = Literal["generate", "embed", "rerank"]
TASKS: tuple[Task, ...] = get_args(Task)
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def tasks_of(setting: Literal["auto"] | Sequence[Task], directory: Path) -> tuple[Task, ...]:
    """Return the tasks that the setting `engine.tasks` means for the model in a directory.

    "auto" recognizes models that sentence-transformers describes (modules.json), and decoders that were saved
    without an output head; all others generate. Raises ModelLoadError for an unsupported pooling.
    """
    config = read_object(directory / "config.json")
    if encoder_of(config) is not None:
        return _tasks_of_encoder(setting, directory)
    if setting != "auto":
        return tuple(setting)
    described = read_json(directory / "modules.json") or []
    modules = {_kind(module): module for module in described if isinstance(module, dict)}
    if "Pooling" in modules:
        place = Path(str(modules["Pooling"].get("path", ""))).name
        _check_pooling(list(modules), read_object(directory / place / "config.json"))
        return ("embed",)
    named = config.get("architectures") if isinstance(config, dict) else None
    is_headless = isinstance(named, list) and bool(named) and all(str(name).endswith("Model") for name in named)
    return ("embed",) if is_headless else ("generate",)


def _tasks_of_encoder(setting: Literal["auto"] | Sequence[Task], directory: Path) -> tuple[Task, ...]:
    """Return the one task of an encoder. Raises ModelLoadError for a setting that names others."""
    task = EncoderConfig.from_directory(directory).task
    if setting not in ("auto", [task], (task,)):
        raise ModelLoadError(
            f"engine.tasks is {list(setting)}, but the model is an encoder that can only {task}: leave the "
            "setting out, or name another model"
        )
    return (task,)


def check_task(sampling: SamplingParams, tasks: Collection[Task], *, is_encoder: bool = False) -> None:
    """Raise ValueError if the model does not serve the request's task."""
    task: Task = "generate"
    if (pooling := sampling.pooling) is not None:
        task = "rerank" if pooling.token_ids or pooling.by_head else "embed"
    if task not in tasks:
        raise ValueError(not_served(task, tasks, is_encoder=is_encoder))
    if pooling is not None and task == "rerank" and pooling.by_head is not is_encoder:
        raise ValueError("scores of a classification head are an encoder's, those of tokens a decoder's")


def not_served(task: Task, tasks: Collection[Task], *, is_encoder: bool = False) -> str:
    """Return the error message for a task that a model does not serve."""
    served = ", ".join(known for known in TASKS if known in tasks)
    if is_encoder:
        path = "/v1/embeddings" if "embed" in tasks else "/v1/rerank or /v1/score"
        return f"this model is an encoder, served to {served}, not to {task}: use {path}, or name another model"
    return f"this model is served to {served}, not to {task}: add {task} to engine.tasks, or name another model"


def _kind(module: dict[str, Any]) -> str:
    return str(module.get("type")).rpartition(".")[2]


def _check_pooling(kinds: Sequence[str], pooling: Any) -> None:
    """Raise ModelLoadError unless embeddings are the last token's state, perhaps normalized."""
    otherwise = "set engine.tasks to serve the model all the same"
    if unknown := [kind for kind in kinds if kind not in _KNOWN_MODULES]:
        raise ModelLoadError(
            f"the model's modules.json has {', '.join(unknown)}, and only {', '.join(_KNOWN_MODULES)} are known; "
            f"{otherwise}"
        )
    stated = pooling if isinstance(pooling, dict) else {}
    flags = [name.removeprefix("pooling_mode_") for name, value in stated.items() if value is True]
    mode = stated.get("pooling_mode", [flag for flag in flags if flag != "include_prompt"])
    if mode not in ("lasttoken", ["lasttoken"]):
        raise ModelLoadError(
            f"the model's pooling of embeddings is {mode or 'not in its files'}, and only lasttoken is "
            f"supported; {otherwise}"
        )
