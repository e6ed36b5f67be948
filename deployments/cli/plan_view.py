"""Prints a plan as tables that mark estimates and give the formula of each figure."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from deployments.cli.units import count_text, seconds_text, size_text
from deployments.simulator.planning.replica import RUNS_WEIGHT_TYPES, ReplicaPlan
from deployments.simulator.planning.report import (
    CapacityPlan,
    exchange,
    figures,
    full_batch,
    warnings,
    weight_table,
    with_and_without,
)
from engine.model_config.config import ELEMENT_BYTES
from engine.model_config.layer_groups import LayerGroups


def show(plan: CapacityPlan, console: Console) -> None:
    """Print the plan's tables and warnings."""
    is_pipeline = len(plan.replica.stages) > 1
    for table in (
        _model(plan),
        _replica(plan),
        *([_stages(plan)] if is_pipeline else []),
        _speed(plan),
        _fleet(plan),
    ):
        console.print(table)
    for warning in warnings(plan):
        console.print(f"[bold yellow]warning:[/] {warning}", highlight=False)


def _table(title: str) -> Table:
    table = Table("", "", "", title=title, show_header=False, title_justify="left", title_style="bold")
    table.columns[1].justify = "right"
    table.columns[2].style, table.columns[2].overflow = "dim", "fold"
    return table


def _model(plan: CapacityPlan) -> Table:
    facts, replica = plan.model.facts, plan.replica
    table = _table(plan.model.name)
    table.add_row("parameters", count_text(facts.num_parameters), f"{facts.num_parameters:,}, tied ones once")
    if facts.experts is not None:
        experts = f"{facts.experts.per_token} of {facts.experts.num_experts} experts in a layer, and all else"
        table.add_row("for each token", count_text(facts.active_parameters), experts)
    for name, num_bytes in weight_table(plan).items():
        table.add_row(f"weights, {name}", size_text(num_bytes), _weights(name))
    heads = f"{' x '.join(map(str, facts.kv_shape))} numbers x {replica.kv_element_bytes} bytes"
    per_layer = replica.kv_bytes_per_token // facts.num_kv_layers
    table.add_row("KV per token and layer", f"{per_layer:,} B", heads)
    table.add_row("KV per token", f"{replica.kv_bytes_per_token:,} B", f"x {facts.num_kv_layers} layers")
    table.add_row("from", "", plan.model.source)
    return table


def _weights(name: str) -> str:
    """Return a description of such weights' bytes; for a type that GPUs cannot run, say that CPUs can."""
    if name not in RUNS_WEIGHT_TYPES["cuda"]:
        return f"on CPUs only, by engine.quantization: {name}"
    matrices = "experts" if name == "mxfp4" else "layers' matrices"
    return "parameters x bytes" if name in ELEMENT_BYTES else f"{matrices} and their scales, the rest plain"


def _replica(plan: CapacityPlan) -> Table:
    replica = plan.replica
    engine, assumed = replica.engine, replica.assumed
    table = _table(f"A replica on {replica.num_gpus} x {replica.gpu.title}{_division(replica)}")
    table.add_row("memory of a GPU", size_text(replica.gpu.memory_bytes), replica.gpu.source)
    weights = f"{replica.weight_share:.0%} of it; at most {assumed.max_weight_share:.0%}, or more GPUs share it"
    most = max(stage.weight_bytes for stage in replica.stages) / replica.tp
    table.add_row("weights on each" if len(replica.stages) == 1 else "most weights", size_text(most), weights)
    table.add_row("reserve", f"{assumed.reserve_gib:.1f} GiB", "CUDA and a step's tensors: assumed, then measured")
    table.add_row("left for KV", size_text(replica.free_bytes * engine.kv_memory_share), _share(plan))
    table.add_row("KV pages", f"{replica.num_pages:,}", f"of {engine.page_tokens} tokens")
    if replica.cp > 1:
        of_a_page = f"GPUs with the same heads keep one each: {engine.page_size} tokens of a page"
        table.add_row("KV in parts", str(replica.cp), of_a_page)
    num_tokens = plan.request.num_tokens
    if slots := replica.num_state_slots:
        each = (
            f"of {size_text(replica.state_bytes / replica.tp)}: max_running = {engine.max_running}, and snapshots"
        )
        table.add_row("recurrent states", f"{slots:,}", each)
    table.add_row("tokens that fit", f"{replica.num_tokens:,}", "pages x tokens of a page")
    concurrent = replica.concurrent_requests(num_tokens)
    each = f"of {num_tokens:,} tokens; at most max_running = {engine.max_running}"
    table.add_row("requests at once", f"{concurrent:,}", each)
    fitting = with_and_without(replica, num_tokens)
    if fitting and isinstance(groups := LayerGroups.of(plan.model.facts), LayerGroups):
        fit = ", ".join(f"{setting}: {fits:,}" for setting, fits in fitting)
        num_windowed = sum(place.group > 0 for place in groups.places)
        windows = f"{num_windowed} of {len(groups.places)} layers see {groups.window:,} tokens"
        table.add_row("engine.windowed_kv", "off" if replica.layer_groups is None else "on", windows)
        table.add_row("  requests that fit", fit, "whatever max_running is")
    return table


def _division(replica: ReplicaPlan) -> str:
    """Describe the stages and hosts of a replica; "" if it has one stage."""
    if len(replica.stages) == 1:
        return ""
    hosts = "one host" if replica.num_hosts == 1 else f"{replica.num_hosts} hosts"
    return f": {len(replica.stages)} stages of {replica.tp}, on {hosts}"


def _stages(plan: CapacityPlan) -> Table:
    """Return what each GPU of each stage holds, and the time of a decode step in it."""
    replica, rows = plan.replica, plan.replica.rows_of(full_batch(plan))
    names = ("stage", "layers", "weights", "KV per token", "left for KV", "pages", "decode step")
    table = Table(*names, title="Each GPU of a stage", title_justify="left", title_style="bold")
    for stage in replica.stages:
        table.add_row(
            str(stage.stage.number),
            f"{stage.layers.start}-{stage.layers.stop - 1}",
            size_text(stage.weight_bytes / replica.tp),
            f"{stage.kv_bytes_per_token // replica.tp:,} B",
            size_text(replica.free_bytes_of(stage) * replica.engine.kv_memory_share),
            f"{replica.num_pages_of(stage):,}",
            f"~{seconds_text(replica.stage_step_s(stage, rows, plan.request.context))}",
        )
    table.caption = "The least pages count. Stage 0 also has the embedding and the output head."
    return table


def _share(plan: CapacityPlan) -> str:
    return f"kv_memory_share = {plan.replica.engine.kv_memory_share:g} of {size_text(plan.replica.free_bytes)}"


def _speed(plan: CapacityPlan) -> Table:
    replica, request = plan.replica, plan.request
    table = _table("Speed of a replica: estimates of what the hardware allows, not measurements")
    bandwidth = (
        f"(weights + KV) / ({replica.gpu.bandwidth_gb_s:,g} GB/s x {replica.assumed.bandwidth_efficiency:g})"
    )
    if (pipeline := figures(plan)) is not None:
        bandwidth = f"a pass of all stages and links, or {pipeline.micro_batches} micro-batches x the slowest"
    for running in sorted({1, full_batch(plan)}):
        step = replica.decode_step_s(running, request.context)
        table.add_row(f"decode step, {running:,} running", f"~{seconds_text(step)}", bandwidth)
        table.add_row("  tokens/s", f"~{running / step:,.0f}", "running / step")
    rate = replica.prefill_tokens_per_s(request.prompt_tokens, request.uncached_tokens)
    flops = f"{replica.gpu.bf16_tflops:,g} TFLOPS x {replica.assumed.mfu:g} / (2 x parameters + attention)"
    table.add_row("prefill tokens/s", f"~{rate:,.0f}", flops if pipeline is None else f"{flops}, or a link's")
    alone = replica.ttft_s_alone(request.uncached_tokens, request.prompt_tokens)
    table.add_row(
        "TTFT without others", f"~{seconds_text(alone)}", f"{request.uncached_tokens:,.0f} tokens and a step"
    )
    if (context := exchange(plan)) is not None:
        of_link = f"of the {replica.peer_gb_s:g} GB/s of --peer-gb-s: queries and partial results"
        table.add_row(
            "exchange, decode", f"~{context.decode.gb_per_s:.2g} GB/s", f"{context.decode.share:.0%} {of_link}"
        )
        if context.is_prefill_hidden:
            of_link = "of it: earlier KV, while attention computes"
        table.add_row(
            "exchange, prefill", f"~{context.prefill.gb_per_s:.2g} GB/s", f"{context.prefill.share:.0%} {of_link}"
        )
    if pipeline is None:
        return table
    burst = f"(stages - 1) / {pipeline.micro_batches} micro-batches: the pipeline fills and empties"
    table.add_row("bubble of a burst", f"+{pipeline.burst_bubble:.0%}", burst)
    steady = "waits of the slowest stage for links and other stages"
    table.add_row("bubble while steady", f"~{pipeline.idle_share:.0%}", steady)
    numbers = f"hidden size x {replica.element_bytes} B x {replica.tp} GPUs"
    link = f"of --link-gb-s {replica.assumed.link_gb_s:g}: {numbers} for each token"
    for name, use in (("decode", pipeline.decode), ("prefill", pipeline.prefill)):
        table.add_row(f"link, {name}", f"~{use.gb_per_s:.2g} GB/s", f"{use.share:.0%} {link}")
    return table


def _fleet(plan: CapacityPlan) -> Table:
    gpus, request = plan.count * plan.replica.num_gpus, plan.request
    table = _table(f"{plan.count} replica{'s' if plan.count > 1 else ''}, {gpus} GPU{'s' if gpus > 1 else ''}")
    table.add_row("tokens that fit", f"{plan.count * plan.replica.num_tokens:,}", "in all replicas")
    if plan.demand is None:
        return table
    each, targets = plan.demand.each, plan.demand.targets
    shape = (
        f"{request.prompt_tokens:,} + {request.output_tokens:,} tokens, {request.hit_rate:.0%} of prompts cached"
    )
    table.add_row("load, requests/s", f"{plan.demand.requests_per_s:g}", shape)
    table.add_row("busy with prefill", f"~{each.busy_share:.0%}", f"at most {targets.max_busy_share:.0%}")
    queue = f"busy / (1 - busy) x prefill time; at most {seconds_text(targets.ttft_target_s)}"
    table.add_row("prefill that waits", f"~{seconds_text(each.queued_prefill_s)}", queue)
    table.add_row("running", f"~{each.num_running:.0f}", "arrivals x time in the batch (Little)")
    kv = f"pages, or places in the batch; at most {targets.max_kv_share:.0%}"
    table.add_row("KV in use", f"~{each.kv_share:.0%}", kv)
    table.add_row("TTFT, mean", f"~{seconds_text(each.ttft_s)}", "queue + prefill + a step")
    table.add_row("ITL, mean", f"~{seconds_text(each.itl_s)}", "a step / (1 - busy)")
    table.caption = "engines.autoscaling applies the same rule, but gives queues catch_up_s to become shorter."
    return table
