"""`raydix plan`: a model's memory and speed on a GPU, and the replicas that a load needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deployments.cli.errors import UserError, one_line
from deployments.cli.plan_view import show
from deployments.simulator.planning.config_file import config_text
from deployments.simulator.planning.known import gpu_named, planned_model
from deployments.simulator.planning.load import STEADY, RequestShape
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from deployments.simulator.planning.report import CapacityPlan, as_json, plan_for, warnings
from engine.settings.config import GPU_DEFAULTS, EngineConfig


def run(
    name: str,
    gpu: str,
    config: Path | None,
    *,
    engine: Mapping[str, Any],
    tensor_parallel: int | None,
    pipeline_parallel: int | None,
    context_parallel: int,
    hosts: int,
    assumed: Assumptions,
    request: RequestShape,
    count: int | None,
    requests_per_s: float | None,
    ttft_target_s: float,
    as_json_text: bool,
    yaml_path: Path | None,
) -> None:
    """Compute and print the plan. Raises UserError for an unknown model or GPU, or a model that does not fit.

    `engine` has settings of `EngineConfig`. With `tensor_parallel` None, as few GPUs as hold the model share it,
    on up to `hosts` hosts, and with `pipeline_parallel` None they are stages only if one host does not hold it.
    `context_parallel` of them with the same key-value heads divide the KV of a request.
    """
    if count is not None and requests_per_s is not None:
        raise UserError("--count and --requests-per-s cannot be combined: give either the replicas or the load", 2)
    try:
        planned, model = gpu_named(gpu), planned_model(name, config)
        step_tokens = GPU_DEFAULTS["max_step_tokens"]
        settings = EngineConfig(
            model=model.name,
            device="cuda",
            max_step_tokens=step_tokens,
            tensor_parallel_size=tensor_parallel or context_parallel,
            pipeline_parallel_size=pipeline_parallel or 1,
            context_parallel_size=context_parallel,
            **engine,
        )
        if tensor_parallel is None:
            replica = smallest_replica(model.facts, planned, settings, assumed, hosts, pipeline_parallel)
        else:
            replica = ReplicaPlan(model.facts, planned, tensor_parallel, settings, assumed)
            if replica.num_hosts > hosts:
                raise ValueError(
                    f"{len(replica.stages)} stages of {tensor_parallel} GPUs take {replica.num_hosts} hosts of "
                    f"{assumed.gpus_per_host} GPUs, but there may be {hosts} (--hosts)"
                )
        if requests_per_s is None:
            plan = CapacityPlan(model, replica, count or 1, request)
        else:
            targets = replace(STEADY, ttft_target_s=ttft_target_s)
            plan = plan_for(model, replica, request, requests_per_s, targets)
    except ValueError as error:  # ModelLoadError is one
        raise UserError(one_line(error)) from None
    if yaml_path is not None:
        _write(yaml_path, config_text(plan.replica, plan.count, _command(), warnings(plan)))
    if as_json_text:
        print(json.dumps(as_json(plan), indent=2))
    elif yaml_path != Path("-"):
        show(plan, Console())


def _write(path: Path, text: str) -> None:
    if path == Path("-"):
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--yaml {path}: {one_line(error)}") from None


def _command() -> str:
    return " ".join(["raydix", *sys.argv[1:]])
