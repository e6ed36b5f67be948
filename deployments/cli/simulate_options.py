"""The options of `raydix simulate`, which imports `deployments/cli/simulate.py` when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.errors import UserError, one_line

_FLEET = "Fleet"
_TIERS = "Memory below the device"
_NEWS = "What the router knows"
_SCALING = "Autoscaling"


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="Recorded traffic: Mooncake JSONL, Azure CSV, plain or gzipped; docs/routing.md has all fields.",
            show_default="an hour of made-up conversations, which comes with Raydix",
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Engine replicas.", min=1, rich_help_panel=_FLEET)] = 16,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Routing policies, separated by commas: names, or your classes as package.module:Class; "
            "[bold]all[/] compares everything.",
            show_default="cost,least_loaded,random; cost with --autoscale",
        ),
    ] = None,
    load: Annotated[
        str,
        typer.Option(help="Offered prompt tokens/s over the fleet's prefill rate; several, separated by commas."),
    ] = "0.85",
    cache_tokens: Annotated[
        int, typer.Option(help="KV memory of a replica, in tokens.", min=1, rich_help_panel=_FLEET)
    ] = 2_097_152,
    host_tokens: Annotated[
        int,
        typer.Option(help="Host memory for KV of a replica, in tokens; 0: none.", min=0, rich_help_panel=_TIERS),
    ] = 0,
    host_min_uses: Annotated[
        int,
        typer.Option(
            help="Requests that must have used a prefix before the host keeps it: engine.host_kv_min_uses.",
            min=1,
            rich_help_panel=_TIERS,
        ),
    ] = 2,
    host_bandwidth: Annotated[
        float, typer.Option(help="GB/s between device and host, each way.", rich_help_panel=_TIERS)
    ] = 25.0,
    file_tokens: Annotated[
        int,
        typer.Option(
            help="Size of files for the host's KV, in tokens: of each replica, or of all with --shared-files.",
            min=0,
            rich_help_panel=_TIERS,
        ),
    ] = 0,
    shared_files: Annotated[
        bool,
        typer.Option("--shared-files", help="All replicas read the same files.", rich_help_panel=_TIERS),
    ] = False,
    file_bandwidth: Annotated[
        float, typer.Option(help="GB/s at which a replica reads and writes files.", rich_help_panel=_TIERS)
    ] = 3.0,
    peer_bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s between replicas, each way; they then fetch KV from each other.",
            show_default="no fetches",
            rich_help_panel=_TIERS,
        ),
    ] = None,
    peer_latency: Annotated[
        float, typer.Option(help="Seconds until a peer's first byte.", rich_help_panel=_TIERS)
    ] = 0.002,
    roles: Annotated[
        str | None,
        typer.Option(
            help="prefill=P,decode=D: replicas that compute long prompts, and those that generate; needs "
            "--peer-bandwidth.",
            show_default="all do both",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    apart_above: Annotated[
        int,
        typer.Option(help="With --roles: uncached tokens above which prompts go apart.", rich_help_panel=_FLEET),
    ] = 2048,
    kv_bytes: Annotated[
        float, typer.Option(help="Bytes of KV of a token, in all layers.", rich_help_panel=_TIERS)
    ] = 131_072.0,
    ingresses: Annotated[
        int, typer.Option(help="Ingresses, each with its own knowledge.", min=1, rich_help_panel=_NEWS)
    ] = 1,
    cache_delay: Annotated[
        float, typer.Option(help="Seconds until they learn of a cache's change.", min=0, rich_help_panel=_NEWS)
    ] = 1.0,
    load_delay: Annotated[
        float, typer.Option(help="Seconds until they learn of a change in load.", min=0, rich_help_panel=_NEWS)
    ] = 0.05,
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            help="Prompt tokens/s of a replica.",
            show_default="the calibration's, or 12000",
            rich_help_panel=_FLEET,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Speeds measured by benchmarks/calibrate.py.", show_default=False, rich_help_panel=_FLEET
        ),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="REPLICA@SECONDS, when a replica dies, e.g. 2@600; may be repeated.",
            show_default=False,
            rich_help_panel=_FLEET,
        ),
    ] = None,
    restart: Annotated[
        float, typer.Option(help="Seconds until a dead replica is back.", min=0, rich_help_panel=_FLEET)
    ] = 30.0,
    requests: Annotated[
        int | None, typer.Option(help="Only the trace's first requests.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals within a tick and of all other randomness.")] = 0,
    json: Annotated[Path | None, typer.Option(help="File to write the figures to.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file to draw them in.", show_default=False)] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Compare settings of autoscaling: requests served in time against replica-hours, as recorded and "
            "with a burst.",
            rich_help_panel=_SCALING,
        ),
    ] = False,
    scaling: Annotated[
        list[str] | None,
        typer.Option(
            help="Fields of engines.autoscaling, e.g. min=4,max=40,upscale_delay_s=5, or a fixed number of "
            "replicas; may be repeated.",
            show_default="as many as --replicas, ten times as many, and from the one to the other",
            rich_help_panel=_SCALING,
        ),
    ] = None,
    burst: Annotated[
        str | None,
        typer.Option(
            help="FACTOR@START+SECONDS of more requests.",
            show_default="10 times as many for 300 s",
            rich_help_panel=_SCALING,
        ),
    ] = None,
    boot: Annotated[
        float, typer.Option(help="Seconds until a new replica serves.", min=0, rich_help_panel=_SCALING)
    ] = 60.0,
    ttft_slo: Annotated[
        float, typer.Option(help="Seconds in which a first token is in time.", min=0, rich_help_panel=_SCALING)
    ] = 5.0,
) -> None:
    """Replay recorded traffic through a simulated fleet and compare routing policies, or autoscaling.

    It runs the router's own index and policies, the replicas' own radix trees and the autoscaler's own policy, on
    simulated time.
    """
    from deployments.cli.simulate import run
    from deployments.cli.simulate_autoscale import ScalingOptions
    from deployments.simulator.fleet.roles import Roles
    from deployments.simulator.fleet.scenario import Scenario
    from deployments.simulator.fleet.tiers import Tiers

    try:
        scenario = Scenario(
            num_replicas=replicas,
            cache_tokens=cache_tokens,
            num_ingresses=ingresses,
            cache_delay=cache_delay,
            load_delay=load_delay,
            tiers=Tiers(
                host_tokens=host_tokens,
                host_min_uses=host_min_uses,
                host_bandwidth=host_bandwidth * 1e9,
                kv_bytes_per_token=kv_bytes,
                file_tokens=file_tokens,
                is_file_store_shared=shared_files,
                file_bandwidth=file_bandwidth * 1e9,
                peer_bandwidth=None if peer_bandwidth is None else peer_bandwidth * 1e9,
                peer_latency_s=peer_latency,
            ),
            roles=None if roles is None else Roles.parse(roles, apart_above),
            restart_s=restart,
            seed=seed,
        )
    except ValueError as error:
        raise UserError(one_line(error)) from None
    run(
        trace,
        policies=policy,
        loads=load,
        kills=kill or (),
        scenario=scenario,
        prefill_rate=prefill_rate,
        calibration=calibration,
        requests=requests,
        json_path=json,
        plot_path=plot,
        scaling=ScalingOptions(scaling or (), burst, boot, ttft_slo) if autoscale else None,
    )
