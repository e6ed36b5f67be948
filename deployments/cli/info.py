"""`raydix info`: describe a model, its KV's size, and how much of it fits here. Reads no weights.

Without a model, it describes the machine, and how it would compute.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.cli.errors import UserError, one_line
from deployments.cli.units import count_text, size_text
from engine.base.errors import ModelLoadError
from engine.base.machine import usable_cores
from engine.gguf.documents import is_gguf
from engine.gguf.files import read_model
from engine.gguf.names import our_names
from engine.gguf.types import BlockType
from engine.loading.kv_memory import available_ram, free_after_slots, pages_for, slots_for
from engine.loading.windowed import layer_groups
from engine.model_config.any_model import model_facts
from engine.model_config.config import ELEMENT_BYTES, ModelConfig
from engine.model_config.eagle3 import Eagle3Config, is_eagle3
from engine.model_config.encoder import EncoderConfig
from engine.model_config.layer_groups import LayerGroups
from engine.model_files.json_files import parse_json
from engine.model_files.model_directory import resolve_metadata
from engine.model_files.weight_files import INDEX, PICKLED_INDEX, weight_files
from engine.parallel.division import stages_of
from engine.parallel.shard import Shard, sizes_for_context
from engine.parallel.stage import WHOLE, Stage
from engine.settings.config import GPU_DEFAULTS, DType, EngineConfig

if TYPE_CHECKING:
    from engine.loading.weights import KeptBlocks


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the memory that an engine here would use."""

    device: str
    free_bytes: int


_ANY_MODEL = "any"
_OF_MODELS = frozenset({"engine.tensor_parallel_size"})
"""Settings whose choice depends on the model."""
_USUAL_HEADS = 32, 8, 128
"""Query heads, key-value heads and their dimension in 8B models, to describe a machine without a model."""


def run(
    model: str | None,
    *,
    page_size: int,
    dtype: str,
    device: str,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
) -> None:
    """Print the table. Raises UserError for a missing or unsupported model, or one without so many stages or parts
    of a request's KV.
    """
    if model is None:
        if pipeline_parallel > 1:
            raise UserError("--pipeline-parallel divides a model's layers: name the model", 2)
        if context_parallel > 1:
            raise UserError("--context-parallel divides a model's KV: name the model", 2)
        table = describe_machine(machine(device), page_size, dtype)
        _add_choices(table, EngineConfig(model=_ANY_MODEL, device=device), None)
        Console().print(table)
        return
    try:
        here, directory = machine(device), resolve_metadata(model)
        if is_eagle3(directory):
            Console().print(describe_eagle3(model, Eagle3Config.from_directory(directory)))
            return
        facts = model_facts(directory)
        if isinstance(facts, EncoderConfig):
            if pipeline_parallel > 1:
                raise UserError(f"{facts.architecture} is an encoder, which runs in one stage", 2)
            if context_parallel > 1:
                raise UserError(f"{facts.architecture} is an encoder, which keeps no KV", 2)
            config = EngineConfig(model=model, page_size=page_size, dtype=cast(DType, dtype))
            table = describe_encoder(model, directory, facts)
        else:
            on_gpu = GPU_DEFAULTS if here.device == "cuda" else {}
            config = EngineConfig(
                model=model,
                page_size=page_size,
                dtype=cast(DType, dtype),
                tensor_parallel_size=sizes_for_context(facts, context_parallel)[0],
                pipeline_parallel_size=pipeline_parallel,
                context_parallel_size=context_parallel,
                **on_gpu,
            )
            table = describe(model, directory, facts, config, here)
        _add_choices(table, replace(config, device=device), facts)
    except ValueError as error:  # ModelLoadError is one
        raise UserError(one_line(error)) from None
    Console().print(table)


def _add_choices(table: Table, config: EngineConfig, facts: ModelConfig | EncoderConfig | None) -> None:
    """Add the settings that `raydix serve` would choose for this machine, each with its reason."""
    from deployments.config.chosen import CannotMeet, choose
    from deployments.control.hardware import this_machine

    names = ("model", "device", "dtype", "page_size", "pipeline_parallel_size")
    args = {"engine": {name: getattr(config, name) for name in names}}
    try:
        [effective] = choose([args], this_machine(), lambda _: facts)
    except CannotMeet as error:
        table.add_row("serve refuses", Text(one_line(error)))
        return
    chosen = [choice for choice in effective.choices if facts is not None or choice.path not in _OF_MODELS]
    lines = [f"{choice.path}: {choice.value} ({choice.reason})" for choice in chosen]
    table.add_row("serve chooses", Text("\n".join(lines)))


def describe_encoder(model: str, directory: Path, facts: EncoderConfig) -> Table:
    """Return the facts of an encoder, which keeps no KV, as a table of two columns."""
    table = Table("", "", title=model, show_header=False, title_justify="left")
    table.add_row("architecture", f"{facts.architecture}, an encoder")
    pooled = {"cls": "the first token's hidden state", "mean": "the mean of all tokens' hidden states"}[
        facts.pooling
    ]
    table.add_row("served to", f"{facts.task}: {'a score of ' if facts.has_head else ''}{pooled}")
    table.add_row("layers", f"{facts.num_layers}, {facts.num_heads} heads of {facts.head_dim}")
    table.add_row("hidden size", f"{facts.hidden_size}, feed-forward {facts.intermediate_size}")
    table.add_row("vocabulary", f"{facts.vocab_size:,} tokens")
    table.add_row("longest prompt", f"{facts.max_position_embeddings:,} tokens")
    _add_unused(table, directory, facts)
    return table


def describe_eagle3(model: str, layer: Eagle3Config) -> Table:
    """Return the facts of an EAGLE-3 checkpoint as a table of two columns."""
    size = ELEMENT_BYTES[layer.layer.dtype]
    table = Table("", "", title=model, show_header=False, title_justify="left")
    table.add_row("architecture", "EAGLE-3: a layer that drafts for a model")
    table.add_row("models", f"with hidden size {layer.model_hidden_size} and {layer.vocab_size:,} tokens")
    table.add_row("reads", f"states of {layer.num_states} of the model's layers")
    table.add_row("parameters", f"{count_text(layer.num_parameters)} ({layer.num_parameters:,})")
    table.add_row("weights", f"{size_text(layer.num_parameters * size)} in {layer.layer.dtype}")
    table.add_row("KV per token", f"{layer.layer.kv_bytes_per_token(size):,} bytes")
    table.add_row("drafts", f"{layer.layer.vocab_size:,} of the tokens")
    table.add_row("context", f"{layer.layer.max_position_embeddings:,} tokens; longer requests get no drafts")
    table.add_row("used by", Text(f"engine.speculation: {{method: eagle3, model: {model}}}"))
    return table


def describe(model: str, directory: Path, facts: ModelConfig, config: EngineConfig, machine: Machine) -> Table:
    """Return the facts as a table of two columns. Raises ValueError for more stages than the layers allow."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = facts.dtype if machine.device == "cuda" else "float32"
    element, facts = ELEMENT_BYTES[dtype], facts.on(machine.device)
    per_token = facts.kv_bytes_per_token(element)
    table = Table("", "", title=model, show_header=False, title_justify="left")
    table.add_row("architecture", facts.architecture)
    table.add_row("parameters", f"{count_text(facts.num_parameters)} ({facts.num_parameters:,})")
    if facts.experts is not None:
        table.add_row("for each token", f"{count_text(facts.active_parameters)} of the parameters")
    table.add_row("layers", f"{facts.num_layers}, {'; some '.join(_heads(facts))}")
    table.add_row("hidden size", f"{facts.hidden_size}, feed-forward {_feed_forward(facts)}")
    table.add_row("vocabulary", f"{facts.vocab_size:,} tokens")
    table.add_row("context", f"{facts.max_position_embeddings:,} tokens")
    weight_bytes, kinds = facts.weight_bytes(element), _kind(facts, dtype)
    stages = stages_of(facts, config)
    weights_of_stages = [stage.weight_bytes(facts, element) for stage in stages]
    if is_gguf(directory):
        kept, why = _kept(directory, facts, dtype, machine.device)
        for name, text in _gguf_rows(directory, dtype, kept, why):
            table.add_row(name, text)
        if kept.tensors:
            saved = _saved(kept, element)
            weight_bytes, kinds = weight_bytes - saved, f"{dtype} and the file's codes"
            weights_of_stages = [
                weights - _saved(_kept(directory, facts, dtype, machine.device, stage)[0], element)
                for weights, stage in zip(weights_of_stages, stages, strict=True)
            ]
            machine = replace(machine, free_bytes=machine.free_bytes + saved)
    else:
        table.add_row("weights on disk", _weights_on_disk(directory, facts))
    table.add_row("weights in memory", f"{size_text(weight_bytes)} as {kinds}")
    table.add_row("KV per token", f"{per_token:,} bytes")
    table.add_row("KV per page", f"{size_text(per_token * config.page_tokens)} ({config.page_tokens} tokens)")
    if len(stages) > 1:
        for stage, weights in zip(stages, weights_of_stages, strict=True):
            table.add_row(f"  stage {stage.number}", _stage(facts, stage, weights, element))
    on_gpus = facts.dtype if config.dtype == "auto" else dtype
    if config.context_parallel_size > 1:
        table.add_row("  in parts", _parts(facts, config, element))
    _add_computing(table, facts, config, dtype, on_gpus, machine.device)
    if config.num_ranks > 1:
        plan = f"raydix plan {model}"
        if len(stages) > 1:
            plan = f"{plan} --pipeline-parallel {len(stages)}"
        if config.context_parallel_size > 1:
            plan = f"{plan} --context-parallel {config.context_parallel_size}"
        table.add_row("KV pages", Text(f"on {config.num_ranks} devices or more: see {plan}"))
    else:
        _add_pages(table, facts, config, machine, element)
    _add_unused(table, directory, facts, element)
    return table


def _add_pages(table: Table, facts: ModelConfig, config: EngineConfig, machine: Machine, element: int) -> None:
    """Add the KV pages and the slots for states of an engine here."""
    table.add_row("KV pages here", _pages(facts, config, machine, element))
    if (windows := _windows(facts, config, machine, element)) is not None:
        table.add_row("layers with a window", windows)
    if facts.delta_net is not None:
        table.add_row("states here", _states(facts, config, machine, element))


def _stage(facts: ModelConfig, stage: Stage, weight_bytes: int, element: int) -> str:
    """Describe the part of a model that one stage of a pipeline has."""
    layers, own = stage.layers(facts.num_layers), stage.of(facts)
    tables = " with the embedding and the output head" if stage.is_first else ""
    names = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start} to {layers.stop - 1}"
    text = f"{names}: {size_text(weight_bytes)} of weights{tables}"
    text = f"{text}, {own.kv_bytes_per_token(element):,} bytes of KV per token"
    return f"{text}, {size_text(states)} for each state" if (states := own.state_bytes(element)) else text


def _parts(facts: ModelConfig, config: EngineConfig, element: int) -> str:
    """Describe the part of a request's KV that each rank keeps."""
    parts, ranks = config.context_parallel_size, config.tensor_parallel_size
    own = Shard(0, ranks).of(facts)
    per_token, heads = own.kv_bytes_per_token(element), f"{own.num_kv_heads} of {facts.num_kv_heads}"
    others = ", ".join(str(size) for size in sizes_for_context(facts, parts) if size != ranks)
    return (
        f"{parts}, on ranks with the same key-value head. With tensor_parallel_size {ranks}"
        f"{f' (or {others})' if others else ''}, a rank has {heads} heads and keeps {config.page_size} tokens of "
        f"each page: on average {per_token / parts:,.0f} bytes per token instead of {per_token:,}"
    )


def _saved(kept: KeptBlocks, element: int) -> int:
    """Return the bytes that kept blocks take less than plain numbers."""
    return kept.num_numbers * element - kept.num_bytes


def _add_unused(table: Table, directory: Path, facts: ModelConfig | EncoderConfig, element: int = 0) -> None:
    """Add the unused contents of the model's files, and the keys that would make a start fail. `element`: bytes of
    a decoder's plain number.
    """
    from engine.loading.mtp_targets import has_mtp_layer, mtp_bytes
    from engine.loading.unused import Unused
    from engine.loading.unused_tensors import unused_encoder_tensors, unused_tensors

    try:
        if isinstance(facts, EncoderConfig):
            tensors = unused_encoder_tensors(directory, facts)
        else:
            tensors = unused_tensors(directory, facts)
    except ModelLoadError:  # There are no weights here, or a start reports their error.
        tensors = []
    if isinstance(facts, ModelConfig) and has_mtp_layer(facts, tensors):
        layer, tables = map(size_text, mtp_bytes(facts, element))
        method = "in the weights: engine.speculation.method mtp drafts with it"
        table.add_row("MTP layer", f"{method}. It takes {layer}, and {tables} more on the first of several GPUs")
    if lines := Unused.of(directory, facts.unused_keys, tensors).lines():
        table.add_row("not used", Text("\n".join(lines)))
    try:
        facts.unused_keys.check(facts.architecture, ())
    except ModelLoadError as error:
        table.add_row("refused", Text(str(error)))


def _heads(facts: ModelConfig) -> list[str]:
    """Return each kind of heads that layers have."""
    return [
        f"{heads.num_heads} query heads, {heads.num_kv_heads} key-value heads of {heads.head_dim}"
        for heads, _ in facts.kinds_of_heads.values()
    ]


def _kind(facts: ModelConfig, dtype: str) -> str:
    """Return the types of the weights in memory, and which weights are widened to them."""
    stored, experts = facts.weight_format, facts.experts
    if experts is not None and experts.is_mxfp4:
        return f"{dtype}; experts {'stay in' if experts.are_quantized else 'are widened from'} MXFP4"
    if stored is None:
        return dtype
    if not stored.is_kept:
        return f"{dtype}, widened from {stored.name}"
    is_mixture = experts is not None and experts.are_quantized
    return f"{stored.name} and {dtype}{'; CPUs compute experts one after another' if is_mixture else ''}"


def _states(facts: ModelConfig, config: EngineConfig, machine: Machine, element: int) -> str:
    """Describe the slots for recurrent states that an engine would allocate."""
    free, state_bytes = _free(facts, machine, element), facts.state_bytes(element)
    try:
        slots = slots_for(config, free, state_bytes)
    except ValueError as error:
        return one_line(error)
    each = f"{size_text(state_bytes)} each, of {facts.num_recurrent_layers} recurrent layers"
    return f"{slots} ({each}; {config.max_running} for running requests, the others for snapshots)"


def _free(facts: ModelConfig, machine: Machine, element: int) -> int:
    return max(0, machine.free_bytes - facts.weight_bytes(element))


def _feed_forward(facts: ModelConfig) -> str:
    """Return the inner size; for a mixture, the number and size of experts, and the number of dense layers."""
    experts, dense = facts.experts, str(facts.intermediate_size)
    if experts is None:
        return dense
    text = f"{experts.num_experts} experts of {experts.intermediate_size}, {experts.per_token} for each token"
    num_dense = facts.num_layers - len(experts.layers)
    return f"{text}; {dense} in {num_dense} dense layers" if num_dense else text


def describe_machine(machine: Machine, page_size: int, dtype: str) -> Table:
    """Return a table of two columns for the machine without a model."""
    on_gpus = "bfloat16" if dtype == "auto" else dtype
    here = "float32" if dtype == "auto" and machine.device == "cpu" else on_gpus
    table = Table("", "", title="this machine", show_header=False, title_justify="left")
    table.add_row("device", _device_name(machine.device))
    memory = "GPU memory" if machine.device == "cuda" else "RAM"
    table.add_row("memory", f"{size_text(machine.free_bytes)} {memory} free")
    table.add_row("cores", f"{usable_cores()}")
    _add_computing(table, None, EngineConfig(page_size=page_size), here, on_gpus, machine.device)
    return table


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return f"CPU; torch {torch.__version__} finds no GPU" if not torch.cuda.is_available() else "CPU"
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{torch.cuda.device_count()} x {name}, compute capability {major}.{minor}; torch {torch.__version__}"


def _add_computing(
    table: Table, facts: ModelConfig | None, config: EngineConfig, here: str, on_gpus: str, device: str
) -> None:
    """Add how the model, or a usual one, is computed here, and how attention is computed on GPUs."""
    import torch

    from deployments.cli.cpu_kernels import attention_text, kernels_text
    from engine.attention.base import AttentionShape

    shape = AttentionShape(*_USUAL_HEADS, config.page_size, frozenset({None}))
    if facts is not None:
        largest = max((heads for heads, _ in facts.kinds_of_heads.values()), key=lambda heads: heads.head_dim)
        shape = AttentionShape.of(largest, facts.windows, config.page_size)
    shape = replace(shape, needs_sums=config.context_parallel_size > 1)
    # Text instead of a string, because brackets, as in 'raydix[flashinfer]', are not markup.
    table.add_row("attention here", Text(attention_text(shape, getattr(torch, here), device)))
    if device == "cpu":
        table.add_row("native kernels", Text(kernels_text(facts, getattr(torch, here))))
        table.add_row("attention on GPUs", Text(attention_text(shape, getattr(torch, on_gpus), "cuda")))


def machine(device: str) -> Machine:
    """Return the GPU's free memory or else the machine's. Imports torch only if there may be a GPU."""
    if device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists()):
        import torch

        if torch.cuda.is_available():
            return Machine("cuda", int(torch.cuda.mem_get_info()[0]))
        if device == "cuda":
            raise UserError("this machine has no CUDA device: leave out --device")
    return Machine("cpu", available_ram())


def _pages(facts: ModelConfig, config: EngineConfig, machine: Machine, element: int) -> str:
    """Describe the pages that an engine would allocate in a share of the memory left by its weights."""
    free, state_bytes = _free(facts, machine, element), facts.state_bytes(element)
    groups = _groups(facts, config)
    try:
        slots = slots_for(config, free, state_bytes) if state_bytes else 0
        room = free_after_slots(config, free, slots * state_bytes)
        pages, per_token = _pages_for(facts, config, room, element, groups)
    except ValueError as error:
        return one_line(error)
    size = size_text(pages * per_token * config.page_size)
    memory = "GPU memory" if machine.device == "cuda" else "RAM"
    share = f"at most {config.kv_memory_share:.0%} of {size_text(free)} {memory}"
    if groups is not None:
        return f"{pages:,} of {groups.num_layers} layers ({config.page_size} tokens each, {size}; {share})"
    return f"{pages:,} ({pages * config.page_size:,} tokens, {size}; {share})"


def _groups(facts: ModelConfig, config: EngineConfig) -> LayerGroups | None:
    """Return the groups of layers with page tables of their own that an engine would have; None for one."""
    groups = layer_groups(config, facts, config.max_model_len or facts.max_position_embeddings)
    return None if isinstance(groups, str) else groups


def _pages_for(
    facts: ModelConfig, config: EngineConfig, room: int, element: int, groups: LayerGroups | None
) -> tuple[int, int]:
    """Return the number of pages in so much memory, and the bytes of a token in a page. Raises ValueError."""
    per_token = facts.kv_bytes_per_token(element)
    per_token = per_token if groups is None else groups.bytes_per_token(per_token)
    longest = config.max_model_len or facts.max_position_embeddings
    return pages_for(config, room, per_token, longest, groups), per_token


_LENGTHS = 1024, 8192, 32768
"""Tokens of the requests for which the table says how many fit."""


def _windows(facts: ModelConfig, config: EngineConfig, machine: Machine, element: int) -> str | None:
    """Return how many requests fit if layers with a window have pages of their own, and if not; None for a
    model in which they cannot.
    """
    groups = LayerGroups.of(facts)
    if isinstance(groups, str):
        return None
    room, size = _free(facts, machine, element), config.page_size
    endless = replace(config, max_running=2**20, max_step_tokens=2**20)  # how many fit, not how many may run
    try:
        apart, _ = _pages_for(facts, endless, room, element, groups)
        shared, _ = _pages_for(facts, endless, room, element, None)
    except ValueError as error:
        return one_line(error)
    fits = [
        f"{apart // groups.pages_for(n, size):,} of {n:,} tokens instead of {shared // -(-n // size):,}"
        for n in _LENGTHS
        if n <= facts.max_position_embeddings
    ]
    num_windowed = sum(place.group > 0 for place in groups.places)
    here = "off" if _groups(facts, config) is None else "on"
    sees = f"{num_windowed} of {len(groups.places)}, which see {groups.window:,} tokens"
    return f"{sees}. With pages of their own, requests fit: {', '.join(fits)} (engine.windowed_kv: {here} here)"


def _kept(path: Path, facts: ModelConfig, dtype: str, device: str, stage: Stage = WHOLE) -> tuple[KeptBlocks, str]:
    """Return which blocks of a model in GGUF stay unchanged in a stage's memory, and why others are widened."""
    import torch

    from deployments.cli.cpu_kernels import why_not_native
    from engine.loading.weights import KeptBlocks, kept_blocks

    if (why := why_not_native(facts, getattr(torch, dtype), device)) is not None:
        return KeptBlocks(frozenset(), 0, 0), why
    try:
        return kept_blocks(path, facts, stage), "a projection that is multiplied with them is plain numbers"
    except ModelLoadError as error:  # a start reports the same
        return KeptBlocks(frozenset(), 0, 0), one_line(error)


def _gguf_rows(path: Path, dtype: str, kept: KeptBlocks, why: str) -> list[tuple[str, str]]:
    """Return rows on a model's files in GGUF, and on the memory of each type of numbers. `why`: why blocks
    that are not kept are widened.
    """
    model = read_model(path)
    size = sum(each.stat().st_size for each in model.paths)
    rows = [("weights on disk", f"{size_text(size)} in GGUF, {len(model.paths)} file(s)")]
    types: dict[BlockType, dict[str, int]] = {}
    for name, tensor in our_names(model).items():
        types.setdefault(tensor.type, {})[name] = tensor.num_bytes
    for kind, sizes in sorted(types.items(), key=lambda item: -sum(item[1].values())):
        stay = [size for name, size in sizes.items() if name in kept.tensors]
        widened = [size for name, size in sizes.items() if name not in kept.tensors]
        if kind.is_plain:
            parts = [f"{len(widened)} tensors, {size_text(sum(widened))}"]
        else:
            parts = [f"{len(stay)} tensors, {size_text(sum(stay))}, stay as they are"] if stay else []
            if widened:
                parts.append(f"{len(widened)} tensors, {size_text(sum(widened))}, widened to {dtype}: {why}")
        rows.append((f"  of it {kind.name}", "\n".join(parts)))
    return rows


def _weights_on_disk(directory: Path, facts: ModelConfig) -> str:
    with suppress(ModelLoadError):
        files = weight_files(directory)
        return f"{size_text(sum(file.stat().st_size for file in files))} in {facts.dtype}, {len(files)} file(s)"
    for index in (INDEX, PICKLED_INDEX):
        with suppress(OSError, ValueError, KeyError, TypeError):
            total = int(parse_json(directory / index)["metadata"]["total_size"])
            return f"{size_text(total)} in {facts.dtype}, not downloaded"
    return f"about {size_text(facts.weight_bytes(ELEMENT_BYTES[facts.dtype]))} in {facts.dtype}, not downloaded"
