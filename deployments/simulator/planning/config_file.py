"""Writes a plan as a `deployments.yaml` for `serve run`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from deployments.config.args import AppArgs
from deployments.simulator.planning.replica import ReplicaPlan

WIDTH = 110


def config_text(replica: ReplicaPlan, count: int, command: str, warnings: Sequence[str]) -> str:
    """Return the file's text, with its origin and the warnings as comments. Its arguments are valid `AppArgs`."""
    args = app_args(replica, count)
    AppArgs.model_validate(args)
    application = {"name": "raydix", "import_path": "deployments.app:build", "args": args}
    config = {"proxy_location": "Disabled", "applications": [application]}
    pages = f"{replica.num_pages:,} KV pages and so {replica.num_tokens:,} tokens per replica are expected."
    notes = [f"Made by: {command}", f"For {replica.gpu.title}: {pages}", *(f"WARNING: {w}" for w in warnings)]
    comments = (textwrap.fill(note, WIDTH, initial_indent="# ", subsequent_indent="#   ") for note in notes)
    return "\n".join([*comments, yaml.safe_dump(config, sort_keys=False)])


def app_args(replica: ReplicaPlan, count: int) -> dict[str, Any]:
    """Return the application's arguments, which this version accepts."""
    engine = replica.engine
    settings: dict[str, Any] = {
        "model": engine.model,
        "device": "cuda",
        "dtype": engine.dtype,
        "page_size": engine.page_size,
        "kv_memory_share": engine.kv_memory_share,
        "max_running": engine.max_running,
    }
    if engine.kv_dtype != "auto":
        settings["kv_dtype"] = engine.kv_dtype
    if engine.max_model_len is not None:
        settings["max_model_len"] = engine.max_model_len
    if engine.quantization is not None:
        settings["quantization"] = engine.quantization
    if replica.tp > 1:
        settings["tensor_parallel_size"] = replica.tp
    if replica.cp > 1:
        settings["context_parallel_size"] = replica.cp
    if len(replica.stages) > 1:
        settings["pipeline_parallel_size"] = len(replica.stages)
    if engine.micro_batches is not None:
        settings["micro_batches"] = engine.micro_batches
    return {
        "engine": settings,
        "engines": {"count": count},
        "ingresses": {"host": "127.0.0.1", "port": 8000},
    }
