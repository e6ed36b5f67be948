"""`raydix plan`: a model's memory and speed on a GPU, and the replicas that a load needs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.console import Console

from deployments.cli.errors import UserError, one_line
from deployments.cli.plan_view import show
from deployments.simulator.planning.config_file import config_text
from deployments.simulator.planning.known import Gpu, PlannedModel, gpu_named, planned_model
from deployments.simulator.planning.load import STEADY, RequestShape
from deployments.simulator.planning.replica import Assumptions, ReplicaPlan, smallest_replica
from deployments.simulator.planning.report import CapacityPlan, as_json, plan_for, warnings
from engine.settings.config import GPU_DEFAULTS, DType, EngineConfig, KVDType, Quantization


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line; `raydix plan --help` gives the units."""

    gpu: str
    config: Path | None
    count: int | None
    requests_per_s: float | None
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    ttft_target_s: float
    dtype: str
    kv_dtype: str
    quantization: str | None
    page_size: int
    max_model_len: int | None
    max_running: int
    kv_memory_share: float
    tensor_parallel: int | None
    """None: as few GPUs as hold the model."""
    bandwidth_efficiency: float
    mfu: float
    reserve_gib: float
    max_weight_share: float


def run(model: str, options: Options, *, as_json_text: bool, yaml_path: Path | None) -> None:
    """Compute and print the plan. Raises UserError for an unknown model or GPU, or a model that does not fit."""
    if options.count is not None and options.requests_per_s is not None:
        raise UserError("--count and --requests-per-s exclude each other: give either the replicas or the load", 2)
    try:
        plan = _plan(model, options)
    except ValueError as error:  # ModelLoadError is one
        raise UserError(one_line(error)) from None
    if yaml_path is not None:
        _write(yaml_path, config_text(plan.replica, plan.count, _command(), warnings(plan)))
    if as_json_text:
        print(json.dumps(as_json(plan), indent=2))
    elif yaml_path != Path("-"):
        show(plan, Console())


def _plan(name: str, options: Options) -> CapacityPlan:
    gpu, model = gpu_named(options.gpu), planned_model(name, options.config)
    replica = _replica(model, gpu, options)
    request = RequestShape(options.prompt_tokens, options.output_tokens, options.hit_rate)
    if options.requests_per_s is None:
        return CapacityPlan(model, replica, options.count or 1, request)
    return plan_for(
        model, replica, request, options.requests_per_s, replace(STEADY, ttft_target_s=options.ttft_target_s)
    )


def _replica(model: PlannedModel, gpu: Gpu, options: Options) -> ReplicaPlan:
    engine = EngineConfig(
        model=model.name,
        device="cuda",
        dtype=cast(DType, options.dtype),
        kv_dtype=cast(KVDType, options.kv_dtype),
        quantization=cast(Quantization | None, options.quantization),
        page_size=options.page_size,
        max_model_len=options.max_model_len,
        max_running=options.max_running,
        max_step_tokens=GPU_DEFAULTS["max_step_tokens"],
        kv_memory_share=options.kv_memory_share,
    )
    assumed = Assumptions(options.bandwidth_efficiency, options.mfu, options.reserve_gib, options.max_weight_share)
    if options.tensor_parallel is None:
        return smallest_replica(model.facts, gpu, engine, assumed)
    return ReplicaPlan(model.facts, gpu, options.tensor_parallel, engine, assumed)


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
