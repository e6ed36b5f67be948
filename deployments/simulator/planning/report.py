"""A whole plan: the model, one replica of it, the number of replicas, and warnings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from deployments.replica.autoscaling import Targets
from deployments.simulator.planning.context import ContextFigures, context_figures
from deployments.simulator.planning.known import PlannedModel
from deployments.simulator.planning.load import Operation, RequestShape, operate, replicas_for
from deployments.simulator.planning.pipeline import PipelineFigures, pipeline_figures
from deployments.simulator.planning.replica import RUNS_WEIGHT_TYPES, ReplicaPlan
from engine.model_config.config import ELEMENT_BYTES
from engine.settings.config import Quantization, WindowedKV


@dataclass(frozen=True, slots=True)
class Demand:
    """A load, and the state of each replica under it."""

    requests_per_s: float
    targets: Targets
    each: Operation


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A model's replicas: `count` is given, or as many as the demand needs."""

    model: PlannedModel
    replica: ReplicaPlan
    count: int
    request: RequestShape
    demand: Demand | None = None


def plan_for(
    model: PlannedModel, replica: ReplicaPlan, request: RequestShape, requests_per_s: float, targets: Targets
) -> CapacityPlan:
    """Plan as many replicas as the load needs. Raises ValueError if no number of them can carry it."""
    count = replicas_for(replica, request, requests_per_s, targets)
    each = operate(replica, request, requests_per_s / count)
    return CapacityPlan(model, replica, count, request, Demand(requests_per_s, targets, each))


def weight_table(plan: CapacityPlan) -> dict[str, int]:
    """Return the bytes of all weights by type; for a quantized checkpoint, only in types that it can have here."""
    facts = plan.model.facts
    if facts.kept_format is not None:
        return {facts.kept_format.name: plan.replica.weight_bytes}
    rounded = filter(facts.can_be_rounded, get_args(Quantization))
    return {
        **{name: facts.weight_bytes(size) for name, size in ELEMENT_BYTES.items()},
        **{name: facts.weight_bytes(ELEMENT_BYTES["bfloat16"], name) for name in sorted(rounded)},
    }


def warnings(plan: CapacityPlan) -> list[str]:
    """Return the plan's problems, most serious first."""
    found = []
    replica = plan.replica
    if replica.num_tokens < replica.longest_request:
        found.append(
            f"A request may have {replica.longest_request:,} tokens, but {replica.num_tokens:,} fit: longer ones "
            "are refused. Set --max-model-len, or choose a larger GPU."
        )
    if replica.weight_share > replica.assumed.max_weight_share:
        found.append(f"Weights take {replica.weight_share:.0%} of the memory, which leaves little for KV.")
    if (pipeline := figures(plan)) is not None:
        found += [
            f"The link between stages limits {name}, which would take {use.share:.0%} of it: set --link-gb-s, or "
            "divide the model into stages of fewer GPUs each."
            for name, use in (("decoding", pipeline.decode), ("prefill", pipeline.prefill))
            if use.share > 1
        ]
        found.append(
            "No pipeline has run on GPUs yet. The time to start transfers between stages is not estimated."
        )
    if replica.cp > 1:
        found.append(
            "KV in parts has not run on several GPUs yet. The time to start the exchanges, three in each layer of "
            "a decode step, is not estimated."
        )
    return found


def figures(plan: CapacityPlan) -> PipelineFigures | None:
    """Return the figures of the plan's pipelines with as many requests as fit; None if there is one stage."""
    return pipeline_figures(plan.replica, full_batch(plan), plan.request)


def exchange(plan: CapacityPlan) -> ContextFigures | None:
    """Return the figures of the plan's exchanges with as many requests as fit; None if KV is not divided."""
    return context_figures(plan.replica, full_batch(plan), plan.request)


def as_json(plan: CapacityPlan) -> dict[str, Any]:
    """Return the plan as JSON, with a unit in each name."""
    replica, facts, request = plan.replica, plan.model.facts, plan.request
    report: dict[str, Any] = {
        "model": {
            "name": plan.model.name,
            "source": plan.model.source,
            "architecture": facts.architecture,
            "parameters": facts.num_parameters,
            "active_parameters": facts.active_parameters,
            "layers": facts.num_layers,
            "query_heads": facts.num_heads,
            "kv_heads": facts.num_kv_heads,
            "head_dim": facts.head_dim,
            "weight_bytes": weight_table(plan),
            "weight_types_run": {device: sorted(types) for device, types in RUNS_WEIGHT_TYPES.items()},
        },
        "gpu": asdict(replica.gpu),
        "request": asdict(request),
        "assumed": asdict(replica.assumed),
        "replica": {
            "tensor_parallel_size": replica.tp,
            "pipeline_parallel_size": len(replica.stages),
            "context_parallel_size": replica.cp,
            "hosts": replica.num_hosts,
            "weight_bytes_per_gpu": max(stage.weight_bytes for stage in replica.stages) // replica.tp,
            "kv_bytes_per_token": replica.kv_bytes_per_token,
            "kv_bytes_per_token_per_layer": replica.kv_bytes_per_token // facts.num_kv_layers,
            "free_bytes_per_gpu": replica.free_bytes,
            "kv_memory_share": replica.engine.kv_memory_share,
            "page_size_tokens": replica.engine.page_tokens,
            "kv_pages": replica.num_pages,
            "state_slots": replica.num_state_slots,
            "state_bytes": replica.state_bytes,
            "kv_tokens": replica.num_tokens,
            "concurrent_requests": replica.concurrent_requests(request.num_tokens),
            "requests_that_fit_by_windowed_kv": dict(with_and_without(replica, request.num_tokens)),
            "decode_step_s_alone": replica.decode_step_s(1, request.context),
            "decode_step_s_full": replica.decode_step_s(full_batch(plan), request.context),
            "prefill_tokens_per_s": replica.prefill_tokens_per_s(request.prompt_tokens, request.uncached_tokens),
            "ttft_s_alone": replica.ttft_s_alone(request.uncached_tokens, request.prompt_tokens),
            "stages": [
                {
                    "layers": [stage.layers.start, stage.layers.stop - 1],
                    "weight_bytes_per_gpu": stage.weight_bytes // replica.tp,
                    "free_bytes_per_gpu": replica.free_bytes_of(stage),
                    "kv_bytes_per_token": stage.kv_bytes_per_token,
                    "kv_pages": replica.num_pages_of(stage),
                    "decode_step_s": replica.stage_step_s(
                        stage, replica.rows_of(full_batch(plan)), request.context
                    ),
                }
                for stage in replica.stages
            ],
            "pipeline": None if (pipeline := figures(plan)) is None else asdict(pipeline),
            "context": None if (context := exchange(plan)) is None else asdict(context),
        },
        "replicas": plan.count,
        "gpus": plan.count * replica.num_gpus,
        "warnings": warnings(plan),
    }
    if plan.demand is not None:
        report["demand"] = asdict(plan.demand)
    return report


def with_and_without(replica: ReplicaPlan, num_tokens: int) -> list[tuple[str, int]]:
    """Return how many requests of that length fit into the pages, whatever `max_running` is, if layers with a
    window have pages of their own ("on"), and if not ("off"). Empty where the model or a setting rules it out.
    """
    settings: tuple[WindowedKV, WindowedKV] = ("on", "off")
    try:
        return [(setting, replica.with_windowed_kv(setting).fits(num_tokens)) for setting in settings]
    except ValueError:
        return []


def full_batch(plan: CapacityPlan) -> int:
    """Return how many requests of the stated shape run concurrently in a replica, at least 1."""
    return max(plan.replica.concurrent_requests(plan.request.num_tokens), 1)
