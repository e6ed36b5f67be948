"""Weights: from safetensors files, mapped into memory, straight into the decoder's fused parameters.

    checkpoint                                  decoder
    model.layers.3.self_attn.q_proj.weight ──▶  layers.3.attention.qkv_proj.weight[: q]
    model.layers.3.self_attn.k_proj.weight ──▶                                    [q : q + k]   ...

Only safetensors is read. Pickle-based files (pytorch_model.bin, *.pt) can run code when loaded and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from engine.loading.mapped import MappedTensor, open_tensors, release
from engine.loading.pieces import Expected, Piece
from engine.loading.quantized import Matrix, is_unread, quantize_layers
from engine.loading.quantized import pieces as quantized_pieces
from engine.loading.ring import stream_pieces
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.errors import ModelLoadError
from engine.models.experts_config import ExpertsConfig
from engine.models.formats import Fp8Format
from engine.models.linear import QuantizedLinear
from engine.parallel.collective import ALONE, Collective
from engine.parallel.shard import Shard

_INDEX = "model.safetensors.index.json"
_MIXTRAL = "block_sparse_moe", ("w1", "w3", "w2")
_QWEN_MOE = "mlp", ("gate_proj", "up_proj", "down_proj")


class _Target(NamedTuple):
    """Where a tensor of the checkpoint goes."""

    parameter: str
    rows: slice | tuple[int, slice]
    """Of the parameter; of a stack of experts' matrices, the rows of one."""
    shape: tuple[int, ...]
    """The shape the checkpoint must have; copied with broadcasting."""
    part: tuple[slice, ...] = ()
    """What of it is this rank's."""


def load_decoder(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    input_major: bool = False,
    fp8: bool = False,
    ranks: Collective = ALONE,
) -> Decoder:
    """This rank's share of the model `config`, with its weights. Names, shapes and types are all checked before
    memory is taken.

    With `input_major` linear weights [out, in] get the strides (1, out): a CPU multiplies few rows (a batch of
    decodes) with a matrix laid out like this up to twice as fast. With `fp8` the layers' matrices are rounded, one
    after the other, as they come from the checkpoint. Raises ModelLoadError.
    """
    files = weight_files(directory)
    with ExitStack() as stack:
        tensors = open_tensors(files, stack)
        targets = dict(_targets(config, ranks.shard))
        with torch.device("meta"):
            decoder = Decoder(ranks.shard.of(config), ranks)
            stored = Fp8Format() if fp8 else config.weight_format
            if stored is not None:
                quantize_layers(decoder, _parts(targets), stored)
        pieces = list(_pieces(decoder, targets, config, tensors))
        _check(tensors, [tensor for piece in pieces for tensor in piece.tensors], config)
        # Zero stays what only other ranks have: a bias, rows after the last token's.
        new = torch.empty if ranks.shard.size == 1 else torch.zeros
        _allocate(decoder, partial(new, dtype=dtype, device=device), input_major, device)
        with torch.no_grad():
            # Of experts that only other ranks have nothing is read.
            pieces = [piece for piece in pieces if piece.into is None or piece.into().numel()]
            if device.type == "cuda":
                stream_pieces(files, pieces, device)
            else:
                _copy_pieces(tensors, pieces)
    return decoder.eval()


def _copy_pieces(tensors: Mapping[str, MappedTensor], pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        stored = [tensors[expected.name].read() for expected in piece.tensors]
        piece.store(stored)
        for tensor in stored:
            release(tensor)


def _parts(targets: Mapping[str, _Target]) -> dict[str, list[str]]:
    """For each module of the decoder with a weight, the names that its rows have in the checkpoint."""
    parts: dict[str, list[str]] = {}
    for name, target in targets.items():
        if target.parameter.endswith(".weight"):
            parts.setdefault(target.parameter.removesuffix(".weight"), []).append(name.removesuffix(".weight"))
    return parts


def _pieces(
    decoder: Decoder, targets: Mapping[str, _Target], config: ModelConfig, present: Container[str]
) -> Iterator[Piece]:
    """Every tensor's way into the decoder, whose parameters may still be on the meta device."""
    modules = dict(decoder.named_modules())
    for name, target in targets.items():
        module, _, attribute = target.parameter.rpartition(".")
        layer = modules[module]
        if isinstance(layer, QuantizedLinear) and attribute == "weight":
            assert isinstance(target.rows, slice)
            outputs, inputs = target.shape
            matrix = Matrix(name.removesuffix(".weight"), outputs, inputs, *target.part)
            yield from quantized_pieces(layer, target.rows, matrix, config.weight_format, present)
        else:
            into = partial(_rows, layer, attribute, target.rows)
            yield Piece((Expected(name, target.shape),), partial(_store, into, target.part), into)


def _rows(module: torch.nn.Module, attribute: str, rows: slice | tuple[int, slice]) -> torch.Tensor:
    return module.get_parameter(attribute).detach()[rows]


def _store(into: Callable[[], torch.Tensor], part: tuple[slice, ...], tensors: list[torch.Tensor]) -> None:
    into().copy_(tensors[0][part])


def _allocate(decoder: Decoder, new: Callable[..., torch.Tensor], input_major: bool, device: torch.device) -> None:
    """Give each parameter of a decoder on the meta device memory of its own, made by `new` from its shape;
    quantized layers take theirs.

    `Module.to_empty` does nearly that, and loads torch's compiler for it.
    """
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_turned = input_major and isinstance(module, torch.nn.Linear) and parameter.ndim == 2
            shape = parameter.shape[::-1] if is_turned else parameter.shape
            empty = new(shape)
            setattr(module, name, torch.nn.Parameter(empty.t() if is_turned else empty, requires_grad=False))
        if isinstance(module, QuantizedLinear):
            module.allocate(device)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, single or sharded. Raises ModelLoadError."""
    if (directory / _INDEX).exists():
        return _shards(directory)
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    pickled = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(directory.glob(pattern))]
    found = (
        f"it has only pickled weights ({', '.join(pickled[:3])}), which can run code"
        if pickled
        else "none is there"
    )
    raise ModelLoadError(
        f"no safetensors weights in {directory}: {found}; expected model.safetensors or {_INDEX}. "
        "Take a version of the model with safetensors, or convert it with save_pretrained"
    )


def _shards(directory: Path) -> list[Path]:
    path = directory / _INDEX
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} is not a weight index ({error!r}); download it again") from error
    for name in names:
        # A name is a file beside the index: whoever made the index must not choose what else is read.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ModelLoadError(f"{path} names the shard {name!r}; a shard is a file in the same directory")
        if not name.endswith(".safetensors"):
            raise ModelLoadError(f"{path} names the shard {name!r}; only safetensors files are read")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ModelLoadError(
            f"{len(missing)} of {len(names)} weight files are missing in {directory} "
            f"({', '.join(missing[:3])}); download the model again"
        )
    return [directory / name for name in names]


def _check(tensors: Mapping[str, MappedTensor], expected: Sequence[Expected], config: ModelConfig) -> None:
    names = {tensor.name for tensor in expected}
    missing = [tensor.name for tensor in expected if tensor.name not in tensors]
    if missing:
        why = "" if config.weight_format is None else ", stored as its quantization_config says"
        raise ModelLoadError(f"the weights lack {_some(missing)}, which {config.architecture} needs{why}")
    unknown = [name for name in tensors if name not in names and not _is_harmless(name, config)]
    if unknown:
        raise ModelLoadError(
            f"the weights hold {_some(unknown)}, which this {config.architecture} does not have: "
            "config.json and weights do not belong together"
        )
    for wanted in expected:
        tensor = tensors[wanted.name]
        if tensor.shape not in (wanted.shape, *wanted.other_shapes):
            raise ModelLoadError(f"{wanted.name} has shape {tensor.shape}, config.json makes it {wanted.shape}")
        if tensor.dtype not in wanted.dtypes:
            raise ModelLoadError(
                f"{wanted.name} is stored as {tensor.dtype}; supported are {', '.join(wanted.dtypes)}"
            )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors some checkpoints carry although they are computed, or a second name of the embedding table."""
    if config.weight_format is not None and is_unread(name):
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _targets(config: ModelConfig, shard: Shard) -> Iterator[tuple[str, _Target]]:
    """Each tensor of a checkpoint, by its Hugging Face name, and where this rank's part of it goes."""
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", _table("embed.weight", config, shard)
    yield "model.norm.weight", _whole("norm.weight", hidden)
    if not config.tied_embeddings:
        yield "lm_head.weight", _table("lm_head.weight", config, shard)
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        yield f"{theirs}.input_layernorm.weight", _whole(f"{ours}.input_norm.weight", hidden)
        yield f"{theirs}.post_attention_layernorm.weight", _whole(f"{ours}.post_norm.weight", hidden)
        yield from _attention_targets(config, shard, f"{theirs}.self_attn", f"{ours}.attention")
        experts = config.experts_in(layer)
        if experts is None:
            yield from _mlp_targets(config, shard, f"{theirs}.mlp", f"{ours}.mlp")
        else:
            yield from _experts_targets(config, experts, shard, theirs, f"{ours}.mlp")


def _attention_targets(config: ModelConfig, shard: Shard, theirs: str, ours: str) -> Iterator[tuple[str, _Target]]:
    hidden, dim, own = config.hidden_size, config.head_dim, shard.of(config)
    query, kv = shard.part(config.num_heads), shard.kv_part(config.num_kv_heads)
    heads = {"q": (config.num_heads, query), "k": (config.num_kv_heads, kv), "v": (config.num_kv_heads, kv)}
    yield from _fused(
        theirs,
        f"{ours}.qkv_proj",
        {f"{which}_proj": (count * dim, _times(part, dim)) for which, (count, part) in heads.items()},
        hidden,
        config.qkv_bias,
    )
    yield from _summed(
        f"{theirs}.o_proj", f"{ours}.o_proj", hidden, config.num_heads * dim, shard, config.output_bias
    )
    if config.qk_norm:
        queries, total = own.num_heads, own.num_heads + own.num_kv_heads
        yield f"{theirs}.q_norm.weight", _Target(f"{ours}.qk_norm", slice(0, queries), (dim,))
        yield f"{theirs}.k_norm.weight", _Target(f"{ours}.qk_norm", slice(queries, total), (dim,))


def _mlp_targets(config: ModelConfig, shard: Shard, theirs: str, ours: str) -> Iterator[tuple[str, _Target]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    parts = dict.fromkeys(("gate_proj", "up_proj"), (inner, shard.part(inner)))
    yield from _fused(theirs, f"{ours}.gate_up_proj", parts, hidden, config.mlp_bias)
    yield from _summed(f"{theirs}.down_proj", f"{ours}.down_proj", hidden, inner, shard, config.mlp_bias)


def _experts_targets(
    config: ModelConfig, experts: ExpertsConfig, shard: Shard, theirs: str, ours: str
) -> Iterator[tuple[str, _Target]]:
    """A sparse layer's: in files each expert is by itself, in memory this rank's are stacked."""
    hidden, inner, own = config.hidden_size, experts.intermediate_size, shard.experts(experts)
    columns, width = shard.expert_columns(experts), own.intermediate_size
    block, (gate, up, down) = _MIXTRAL if config.architecture == "MixtralForCausalLM" else _QWEN_MOE
    yield f"{theirs}.{block}.gate.weight", _whole(f"{ours}.router", experts.num_experts, hidden)
    for expert in range(experts.num_experts):
        name = f"{theirs}.{block}.experts.{expert}"
        place = own.held.index(expert) if expert in own.held else None
        for part, rows in ((gate, slice(0, width)), (up, slice(width, None))):
            target = _expert(f"{ours}.gate_up_proj", place, rows, (inner, hidden), (columns,))
            yield f"{name}.{part}.weight", target
        target = _expert(f"{ours}.down_proj", place, slice(None), (hidden, inner), (slice(None), columns))
        yield f"{name}.{down}.weight", target


def _expert(
    parameter: str, place: int | None, rows: slice, shape: tuple[int, ...], part: tuple[slice, ...]
) -> _Target:
    """Rows of the expert at that place in a stack; nothing of one that is another rank's."""
    if place is None:
        return _Target(parameter, (0, slice(0)), shape, (slice(0),))
    return _Target(parameter, (place, rows), shape, part)


def _whole(parameter: str, *shape: int) -> _Target:
    return _Target(parameter, slice(None), shape)


def _table(parameter: str, config: ModelConfig, shard: Shard) -> _Target:
    """A row for each token. Rows after the last one stay zero."""
    own = shard.rows(config.vocab_size)
    shape = (config.vocab_size, config.hidden_size)
    return _Target(parameter, slice(0, own.stop - own.start), shape, (own,))


def _fused(
    theirs: str, ours: str, parts: Mapping[str, tuple[int, slice]], inputs: int, bias: bool
) -> Iterator[tuple[str, _Target]]:
    """Projections of the same input, stacked by rows in the order of `parts`: name to all outputs, and ours."""
    first = 0
    for name, (outputs, part) in parts.items():
        rows = slice(first, first + part.stop - part.start)
        yield f"{theirs}.{name}.weight", _Target(f"{ours}.weight", rows, (outputs, inputs), (part,))
        if bias:
            yield f"{theirs}.{name}.bias", _Target(f"{ours}.bias", rows, (outputs,), (part,))
        first = rows.stop


def _summed(
    theirs: str, ours: str, outputs: int, inputs: int, shard: Shard, bias: bool
) -> Iterator[tuple[str, _Target]]:
    """A projection whose inputs are divided among ranks and whose outputs are summed up: one adds the bias."""
    part = (slice(None), shard.part(inputs))
    yield f"{theirs}.weight", _Target(f"{ours}.weight", slice(None), (outputs, inputs), part)
    if bias:
        rows = slice(None) if shard.rank == 0 else slice(0)
        yield f"{theirs}.bias", _Target(f"{ours}.bias", rows, (outputs,), (rows,))


def _times(part: slice, count: int) -> slice:
    return slice(part.start * count, part.stop * count)
