"""Chooses the omitted settings that depend on the machine; no other module does.

    given settings + machine + model's size  ──choose──▶  settings in effect, each with its reason

`raydix serve`, `raydix deploy` and `deployments.app:build` call this before they check the settings, and
`raydix serve --dry-run` shows what it returns. Given settings stay unchanged: one that the machine cannot meet is
an error, or a warning on a cluster, which may grow. All others have the defaults that docs/tuning.md lists.

A choice that is part of a deployment's version must not depend on numbers of replicas, which change without a
restart; each process makes such choices itself (`is_written`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from deployments.config.args import AppArgs, ModelArgs
from deployments.config.machine import Hardware
from deployments.config.placement import IN_WORDS
from deployments.config.settings import ResponseSettings
from engine.base.machine import FEW_CORES, shared_threads
from engine.loading.kv_memory import check_room
from engine.model_config.config import ELEMENT_BYTES, ModelConfig
from engine.model_config.encoder import EncoderConfig
from engine.parallel.division import stages_of
from engine.parallel.shard import Shard, possible_sizes
from engine.settings.config import GPU_DEFAULTS, EngineConfig

RESERVE_BYTES = 2 * 2**30
"""Memory of a GPU that is not counted on for weights and KV when the number of GPUs is chosen: CUDA's context, the
largest step, graphs. An estimate: an engine measures what its own steps take before it allocates KV."""
FEW_CPUS = 0.25
"""CPUs that Ray reserves for a process where there are few cores, or where the process shares all of them."""
ROOMY_CORES = 8
"""Cores, besides one for each GPU, from which ingresses and engines on GPUs reserve a whole CPU each."""
MOST_INGRESSES = 4
CORES_PER_INGRESS = 4

ModelFacts = ModelConfig | EncoderConfig
FactsOf = Callable[[EngineConfig], ModelFacts | None]
"""Returns the facts in a model's files; None if they are not here."""


class CannotMeet(ValueError):
    """The machine cannot meet settings that were given; the message says which, with numbers."""


@dataclass(frozen=True, slots=True)
class ChosenSetting:
    """An omitted setting, its value and the reason for it."""

    path: str
    value: Any
    reason: str
    is_written: bool = True
    """Whether it is put into `args`; otherwise each process finds it when it starts."""


@dataclass(frozen=True, slots=True)
class Effective:
    """The settings of an application that are in effect."""

    args: dict[str, Any]
    """Arguments with the chosen settings."""
    choices: tuple[ChosenSetting, ...]
    warnings: tuple[str, ...] = ()
    """Requirements that the cluster does not meet now."""


def choose(
    applications: Sequence[Mapping[str, Any]], machine: Hardware, facts_of: FactsOf
) -> tuple[Effective, ...]:
    """Choose the settings that the arguments of these applications, which share the machine, omit.

    The arguments are valid `AppArgs`. Raises CannotMeet; ValueError where `facts_of` does.
    """
    parsed = [AppArgs.model_validate(args) for args in applications]
    num_models = sum(len(args.served) for args in parsed)
    chosen = [
        _application(args, checked, machine, facts_of, num_models == 1)
        for args, checked in zip(applications, parsed, strict=True)
    ]
    shortages = list(_shortages([AppArgs.model_validate(args) for args, _ in chosen], machine))
    if shortages and not machine.may_grow:
        raise CannotMeet("; ".join(shortages))
    threads = _threads([AppArgs.model_validate(args) for args, _ in chosen], machine)
    return tuple(
        Effective(args, (*choices, *more), tuple(shortages))
        for (args, choices), more in zip(chosen, threads, strict=True)
    )


def _application(
    given: Mapping[str, Any], checked: AppArgs, machine: Hardware, facts_of: FactsOf, is_only_model: bool
) -> tuple[dict[str, Any], list[ChosenSetting]]:
    args, choices = deepcopy(dict(given)), []
    parts = args.get("models") or [args]
    for index, (part, model) in enumerate(zip(parts, checked.served.values(), strict=True)):
        where = f"models[{index}]." if args.get("models") else ""
        found = list(_model(part, model, machine, facts_of, is_only_model))
        _write(part, found)
        choices += [ChosenSetting(where + each.path, each.value, each.reason, each.is_written) for each in found]
    found = list(_ingresses(args, checked, machine))
    _write(args, found)
    return args, choices + found


def _write(part: dict[str, Any], choices: Sequence[ChosenSetting]) -> None:
    for choice in choices:
        if choice.is_written:
            section, _, name = choice.path.partition(".")
            part[section] = {**(part.get(section) or {}), name: choice.value}


# --- a model's engines ----------------------------------------------------------------------------------


def _model(
    part: Mapping[str, Any], model: ModelArgs, machine: Hardware, facts_of: FactsOf, is_only_model: bool
) -> Iterator[ChosenSetting]:
    """Yield the settings chosen for one model, which `part` describes."""
    engine, engines = part.get("engine") or {}, part.get("engines") or {}
    device = model.engine.device
    if device == "auto":
        device, reason = _device(model, machine)
        yield ChosenSetting("engine.device", device, reason)
    elif device.startswith("cuda"):
        _check_there_is_one(f'engine.device is "{device}"', machine)
    if device.startswith("cuda"):
        yield from _on_gpus(engine, engines, model, machine, facts_of, is_only_model)
        return
    if "num_cpus" not in engines and "threads" not in engine:
        yield ChosenSetting("engines.num_cpus", FEW_CPUS, "its threads take the cores that are there")
    if _is_count_open(engines, model):
        yield ChosenSetting("engines.count", 1, "one engine computes with all cores" if is_only_model else _SHARED)


_SHARED = "one for each of several models"


def _device(model: ModelArgs, machine: Hardware) -> tuple[str, str]:
    """Return the device of an engine that leaves it to the machine, and why. Raises CannotMeet."""
    num_gpus = model.engines.num_gpus
    if num_gpus == 0:
        return "cpu", "engines.num_gpus is 0"
    if model.engine.model == "demo" and num_gpus is None:
        return "cpu", "the embedded model is small enough for a CPU core"
    if machine.unknown:
        raise CannotMeet(machine.unknown)
    if machine.gpus:
        return "cuda", machine.described()
    if num_gpus is None:
        return "cpu", machine.described()
    if not machine.may_grow:
        raise CannotMeet(f"engines.num_gpus is {num_gpus:g}, but {machine.described()}; leave it out to use CPUs")
    return "cuda", f"engines.num_gpus is {num_gpus:g}"


def _check_there_is_one(given: str, machine: Hardware) -> None:
    if not machine.gpus and not machine.unknown and not machine.may_grow:
        raise CannotMeet(f"{given}, but {machine.described()}; leave it out to use CPUs")


def _on_gpus(
    engine: Mapping[str, Any],
    engines: Mapping[str, Any],
    model: ModelArgs,
    machine: Hardware,
    facts_of: FactsOf,
    is_only_model: bool,
) -> Iterator[ChosenSetting]:
    is_whole = model.engines.num_gpus is None or model.engines.num_gpus >= 1
    if model.engines.num_gpus is None:
        yield ChosenSetting("engines.num_gpus", 1.0, "an engine, or each of its ranks, has a GPU to itself", False)
    size = model.engine.tensor_parallel_size
    if "tensor_parallel_size" in engine:
        _check_size(model.engine, machine, facts_of)
    else:
        size, reason = _size(model, machine, facts_of)
        yield ChosenSetting("engine.tensor_parallel_size", size, reason)
    if _is_count_open(engines, model):
        yield ChosenSetting("engines.count", *_count(model, size, machine, is_only_model))
    for name, value in GPU_DEFAULTS.items():
        if name in engine or (name == "kv_memory_share" and model.engine.kv_pages is not None):
            continue
        if is_whole or name != "kv_memory_share":
            yield ChosenSetting(f"engine.{name}", value, _ON_GPUS[name])
    if not is_whole and "kv_memory_share" not in engine and model.engine.kv_pages is None:
        share = min(EngineConfig().kv_memory_share, (model.engines.num_gpus or 0.5) / 2)
        yield ChosenSetting(
            "engine.kv_memory_share", share, "other engines share the GPU: better give engine.kv_pages"
        )
    if "num_cpus" not in engines:
        yield ChosenSetting("engines.num_cpus", *_num_cpus(machine))


_ON_GPUS = {
    "kv_memory_share": "of the GPU memory that weights, the largest step and CUDA graphs leave, which is measured",
    "max_step_tokens": "a GPU computes longer steps at a better rate",
}


def _size(model: ModelArgs, machine: Hardware, facts_of: FactsOf) -> tuple[int, str]:
    """Return how many GPUs share the model: as few as hold it. Raises CannotMeet when a node's are too small."""
    config, memory = model.engine, machine.least_memory
    if model.engines.num_gpus not in (None, 1) or config.device not in ("auto", "cuda"):
        return 1, "the settings give each engine its GPUs"
    if memory is None:
        return 1, "the GPUs' memory is not known here"
    facts = facts_of(config)
    if facts is None:
        return 1, "the model's files are not here to tell its size"
    if isinstance(facts, EncoderConfig):
        return 1, "an encoder runs on one GPU"
    possible, num_stages = possible_sizes(facts, config.expert_parallel), config.pipeline_parallel_size
    sizes = _sizes(possible, num_stages, machine)
    if not sizes and num_stages > 1 and not machine.may_grow:
        raise CannotMeet(
            f"engine.pipeline_parallel_size is {num_stages}, but {machine.described()}: each stage needs at least "
            "one GPU; lower it"
        )
    of_each = "" if num_stages == 1 else f" in each of {num_stages} stages"
    for size in sizes or [1]:
        if not (fault := _fault(config, facts, size, memory - RESERVE_BYTES)):
            needs = f"weights and the longest request's KV fit {_on(size)} of {_gib(memory)}{of_each}"
            return size, needs if size == 1 else f"{needs}, and on no fewer"
    size = (sizes or [1])[-1]
    if _fault(config, facts, size, memory):
        advice = _pipeline(config, facts, possible, machine, memory)
        raise CannotMeet(
            f"on {_count_of_gpus(size)} of {_gib(memory)}{of_each} ({machine.described()}), {fault}{advice}"
        )
    return size, f"weights and the longest request's KV just fit {_on(size)} of {_gib(memory)}{of_each}"


def _sizes(possible: Sequence[int], num_stages: int, machine: Hardware) -> list[int]:
    """Return the possible sizes of a stage, in GPUs of one machine, of which `num_stages` have room together."""
    return [size for size in possible if machine.engines(size) >= num_stages]


def _pipeline(
    config: EngineConfig, facts: ModelConfig, possible: Sequence[int], machine: Hardware, memory: int
) -> str:
    """Return the advice to divide the model into the fewest stages with which the GPUs hold it; "" if none do."""
    for count in range(config.pipeline_parallel_size + 1, len(machine.gpus) + 1):
        try:
            divided = replace(config, pipeline_parallel_size=count)
            sizes = _sizes(possible, count, machine)
            if sizes and not _fault(divided, facts, sizes[-1], memory):
                return (
                    f"; or set engine.pipeline_parallel_size to {count}: then {count} stages on "
                    f"{_count_of_gpus(sizes[-1])} each hold it"
                )
        except ValueError:  # The layers cannot be divided into so many stages.
            break
    return ""


def _check_size(config: EngineConfig, machine: Hardware, facts_of: FactsOf) -> None:
    """Raise CannotMeet when the GPUs cannot hold the model that so many of them are to share."""
    size, memory = config.tensor_parallel_size, machine.least_memory
    if machine.may_grow or machine.unknown:
        return
    if config.pipeline_parallel_size > 1 and len(machine.gpus) < config.num_ranks:
        raise CannotMeet(
            f"engine.pipeline_parallel_size is {config.pipeline_parallel_size} and engine.tensor_parallel_size is "
            f"{size}, together {_count_of_gpus(config.num_ranks)}, but {machine.described()}; lower one of them"
        )
    if size > machine.most_gpus:
        raise CannotMeet(
            f"engine.tensor_parallel_size is {size}, but {machine.described()}; lower it, or leave it out to use "
            "as few GPUs as can hold the model"
        )
    facts = None if memory is None else facts_of(config)
    if memory is None or not isinstance(facts, ModelConfig):
        return
    if size in possible_sizes(facts, config.expert_parallel) and (fault := _fault(config, facts, size, memory)):
        raise CannotMeet(
            f"on {_count_of_gpus(size)} of {_gib(memory)} (engine.tensor_parallel_size), {fault}"
            f"{_pipeline(config, facts, [size], machine, memory)}"
        )


def _fault(config: EngineConfig, facts: ModelConfig, size: int, memory: int) -> str:
    """Return why `size` GPUs with so much memory each do not hold the model, or each of its stages; "" if they do.

    Raises ValueError if the layers cannot be divided into so many stages.
    """
    element = ELEMENT_BYTES[facts.dtype if config.dtype == "auto" else config.dtype]
    kv_element = 1 if config.kv_dtype == "fp8" else element
    share, stages = Shard(0, size).of(facts), stages_of(facts, config)
    longest = config.max_model_len or facts.max_position_embeddings
    try:
        for stage in stages:
            per_token = stage.of(share).kv_bytes_per_token(kv_element)
            check_room(config, facts, element, per_token, longest, memory, size, stage)
    except ValueError as error:
        return str(error)
    return ""


def _count(model: ModelArgs, size: int, machine: Hardware, is_only_model: bool) -> tuple[int, str]:
    """Return the number of engines on GPUs, and why."""
    if not is_only_model:
        return 1, _SHARED
    each = (1.0 if model.engines.num_gpus is None else model.engines.num_gpus) * size
    if each < 1 or model.engine.device not in ("auto", "cuda"):
        return 1, "the settings give it a part of the GPUs"
    stages = model.engine.pipeline_parallel_size
    count = machine.engines(each, num_stages=stages, placement=model.engines.placement)
    if count < 1:
        return 1, f"{machine.described()} now"
    per = "one engine for each GPU" if each * stages == 1 else f"one engine for {each * stages:g} GPUs"
    return count, f"{per}, and {machine.described()}"


def _is_count_open(engines: Mapping[str, Any], model: ModelArgs) -> bool:
    return model.load_at_start and not any(engines.get(key) for key in ("count", "autoscaling", "roles"))


def _num_cpus(machine: Hardware) -> tuple[float, str]:
    """Return the CPUs that Ray reserves for an ingress, or for an engine that computes on GPUs, and why."""
    gpus = len(machine.gpus)
    if machine.cores >= ROOMY_CORES + gpus:
        return 1.0, f"{machine.cores} cores are enough for a whole one each"
    # Few enough for an engine on each GPU, and for twice the ingresses while they are replaced.
    fitting = machine.cores / (gpus + 2 + machine.cores * 2 / CORES_PER_INGRESS)
    return min(FEW_CPUS, int(fitting * 100) / 100), f"{machine.cores} cores are few"


# --- ingresses ------------------------------------------------------------------------------------------


def _ingresses(args: Mapping[str, Any], checked: AppArgs, machine: Hardware) -> Iterator[ChosenSetting]:
    given, store = args.get("ingresses") or {}, checked.responses.store
    is_store_given = "store" in (args.get("responses") or {})
    most = max(1, min(MOST_INGRESSES, machine.cores // CORES_PER_INGRESS))
    is_kept_apart = store == "memory" and checked.responses.max_bytes > 0
    if "count" not in given:
        count, reason = most, f"{machine.cores} cores, one for each {CORES_PER_INGRESS}, at most {MOST_INGRESSES}"
        is_shareable = len(machine.nodes) == 1 and bool(machine.nodes[0].cache)
        if count > 1 and is_kept_apart and (is_store_given or not is_shareable):
            count = 1
            reason = f'responses.store is "memory", which ingresses do not share; {most} otherwise'
        yield ChosenSetting("ingresses.count", count, reason)
        if count > 1 and is_kept_apart:
            store = f"file://{machine.nodes[0].cache}/responses-{checked.ingresses.port}"
            ResponseSettings(store=store)  # raises if that is not a URL
            yield ChosenSetting(
                "responses.store", store, "several ingresses share it; memory would be each one's own"
            )
            is_store_given = True
    if not is_store_given:
        yield ChosenSetting("responses.store", store, "default")
    if "num_cpus" not in given:
        yield ChosenSetting("ingresses.num_cpus", *_num_cpus(machine))


# --- resources that the machine lacks, and numbers that processes find themselves ------------------------


def _shortages(applications: Sequence[AppArgs], machine: Hardware) -> Iterator[str]:
    """Yield the resources that the applications reserve in Ray beyond those that exist, with numbers."""
    models = [model for args in applications for model in args.served.values() if model.load_at_start]
    for model in models:
        if not machine.unknown and (fault := _misplaced(model, machine)):
            yield fault
            return
    gpus = sum(model.engines.num_expected * model.gpus_per_engine for model in models)
    if gpus > len(machine.gpus) and not machine.unknown:
        wanted = " and ".join(
            f"{_replicas(model)} of {model.name} with {model.gpus_per_engine:g} each"
            for model in models
            if model.gpus_per_engine
        )
        room = _room(models[0], machine) if len(models) == 1 and models[0].gpus_per_engine else 0
        advice = f"lower engines.count to at most {room}" if room else "lower engines.count"
        yield f"{wanted} take {gpus:g} GPUs, but {machine.described()}: {advice}, or set engine.device to cpu"
    cpus = sum(
        model.engines.num_expected * model.engines.num_cpus * model.engine.num_ranks for model in models
    ) + sum(args.ingresses.count * args.ingresses.num_cpus for args in applications)
    if cpus > machine.cpus:
        yield (
            f"engines ({sum(model.engines.num_expected for model in models)}) and ingresses "
            f"({sum(args.ingresses.count for args in applications)}) reserve {cpus:g} CPUs in Ray, but there are "
            f"{machine.cpus:g}: lower engines.num_cpus, ingresses.num_cpus or a count"
        )


def _misplaced(model: ModelArgs, machine: Hardware) -> str:
    """Return why no engine of a model has room as `engines.placement` demands; "" if one has."""
    engine, gpus = model.engine, model.gpus_per_rank * model.engine.tensor_parallel_size
    if engine.pipeline_parallel_size == 1:
        if gpus <= machine.most_gpus:
            return ""
        return (
            f"an engine of {model.name} takes {gpus:g} GPUs of one machine "
            f"(engines.num_gpus x engine.tensor_parallel_size), but {machine.described()}"
        )
    if _room(model, machine):
        return ""
    cpus = model.engines.num_cpus * engine.tensor_parallel_size
    return (
        f"an engine of {model.name} has {engine.pipeline_parallel_size} stages (engine.pipeline_parallel_size), "
        f"{IN_WORDS[model.engines.placement]} (engines.placement), of {gpus:g} GPUs and {cpus:g} CPUs each "
        f"(engine.tensor_parallel_size), but the machines are {machine.described_nodes()}"
    )


def _room(model: ModelArgs, machine: Hardware) -> int:
    """Return the number of a model's engines for which there is room. CPUs only count where stages are placed."""
    engine, engines = model.engine, model.engines
    gpus, stages = model.gpus_per_rank * engine.tensor_parallel_size, engine.pipeline_parallel_size
    cpus = engines.num_cpus * engine.tensor_parallel_size if stages > 1 else 0.0
    return machine.engines(gpus, cpus, stages, engines.placement)


def _replicas(model: ModelArgs) -> str:
    number = model.engines.num_expected
    return f"{number} engine{'s' if number != 1 else ''}"


def _threads(applications: Sequence[AppArgs], machine: Hardware) -> Iterator[list[ChosenSetting]]:
    """Yield for each application the threads with which its engines on CPUs will compute."""
    node = max(machine.nodes, key=lambda each: each.cores)
    for args in applications:
        ranks = sum(model.engines.num_expected * model.engine.num_ranks for model in args.served.values())
        found = []
        for index, model in enumerate(args.served.values()):
            where = f"models[{index}]." if args.models else ""
            if model.engine.device == "cpu" and model.engine.threads is None:
                value, reason = _threads_of(model, ranks, node.cores, node.omp_threads)
                found.append(ChosenSetting(f"{where}engine.threads", value, reason, False))
        yield found


def _threads_of(model: ModelArgs, ranks: int, cores: int, omp_threads: int | None) -> tuple[int, str]:
    if omp_threads is not None:
        return omp_threads, "OMP_NUM_THREADS"
    if model.engines.num_cpus >= 1:
        return int(model.engines.num_cpus), "as many as the CPUs that it reserves (engines.num_cpus)"
    left = "" if cores < FEW_CORES else ", but for one that is left to the ingresses"
    shared = "" if ranks == 1 else f", shared by {ranks} engine processes"
    return shared_threads(ranks, cores), f"one for each of {cores} cores{left}{shared}"


def _on(size: int) -> str:
    return f"on {_count_of_gpus(size)}"


def _count_of_gpus(size: int) -> str:
    return "one GPU" if size == 1 else f"{size} GPUs"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
