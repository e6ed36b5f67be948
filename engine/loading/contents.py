"""Checks the names, shapes and types of a checkpoint's tensors, which its files' headers state.

Of most models without torch, which takes seconds to import: a start that would fail fails at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.loading.encoder_targets import LEFT_OUT, encoder_prefix, encoder_targets
from engine.loading.gemma4_targets import is_kv_of
from engine.loading.gguf.documents import is_gguf
from engine.loading.mapped_tensors import MappedTensor, open_tensors
from engine.loading.targets import HEAD, weight_targets
from engine.loading.tensor_groups import Expected
from engine.loading.weight_files import weight_files
from engine.models.config import ModelConfig
from engine.models.encoders.config import EncoderConfig
from engine.models.errors import ModelLoadError
from engine.parallel.shard import Shard

_UNREAD = ("input_scale", "activation_scale", "g_idx", "weight_shape")
"""Tensors of quantized matrices that are not needed: each token's activations are rounded by their own scale."""
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
"""Scales for KV in eight bits, also in plain checkpoints. Those of `engine.kv_dtype: fp8` are measured here."""


def unused_tensors(directory: Path, config: ModelConfig, *, needs_head: bool = False) -> list[str]:
    """Return the names of a decoder's tensors that are not loaded. The files' headers are checked as loading
    them does. Raises ModelLoadError.
    """
    if config.weight_format is None and config.experts is None and not is_gguf(directory):
        with ExitStack() as stack:
            tensors = open_tensors(weight_files(directory), stack, is_read=False)
            # Otherwise it is the files that say whether there is a head, which may differ from the table.
            if config.tied_embeddings != any(name.endswith(HEAD) for name in tensors):
                targets = weight_targets(config, Shard(), tensors)
                expected = [Expected(name, target.shape) for name, target in targets.items()]
                return check_decoder_tensors(tensors, expected, config)
    from engine.loading import weights  # torch

    return weights.unused_tensors(directory, config, needs_head=needs_head)


def unused_encoder_tensors(directory: Path, config: EncoderConfig) -> list[str]:
    """Return the names of a checkpoint's tensors that are not loaded. Raises ModelLoadError."""
    with ExitStack() as stack:
        tensors = open_tensors(weight_files(directory), stack, is_read=False)
        targets = encoder_targets(config, encoder_prefix(tensors))
        return check_encoder_tensors(
            tensors, [Expected(name, target.shape) for name, target in targets.items()], config
        )


def check_encoder_tensors(
    tensors: Mapping[str, MappedTensor], expected: Sequence[Expected], config: EncoderConfig
) -> list[str]:
    """Check an encoder's tensors and return the names of those that are left out. Raises ModelLoadError."""
    left_out = tuple(f"{encoder_prefix(tensors)}{name}" for name in LEFT_OUT)
    check_tensors(
        tensors, expected, [name for name in tensors if not name.startswith(left_out)], config.architecture
    )
    names = {tensor.name for tensor in expected}
    return [name for name in tensors if name not in names]


def check_decoder_tensors(
    tensors: Mapping[str, MappedTensor], expected: Sequence[Expected], config: ModelConfig
) -> list[str]:
    """Check a decoder's tensors and return the names of those that are left out. Raises ModelLoadError."""
    names = {tensor.name for tensor in expected}
    missing = [name for name in names if name not in tensors]
    why = "" if config.weight_format is None else ", stored as its quantization_config says"
    if len(missing) == 1 and missing[0].endswith(HEAD):
        why = " to generate; where it is to embed alone, say engine.tasks: [embed]"
    others = [name for name in tensors if name not in names]
    prefixes = tuple(prefix.format(layers=config.num_layers) for prefix in config.names.left_out)
    unknown = [name for name in others if not (name.startswith(prefixes) or _is_harmless(name, config))]
    check_tensors(tensors, expected, unknown, config.architecture, why)
    return others


def check_tensors(
    tensors: Mapping[str, MappedTensor],
    expected: Sequence[Expected],
    named: Sequence[str],
    architecture: str,
    why: str = "",
) -> None:
    """Raise ModelLoadError unless a checkpoint has all `expected` tensors as they have to be, and no others among
    `named`, the checkpoint's names without those that are left out. `why` ends the message about missing ones.
    """
    names = {tensor.name for tensor in expected}
    if missing := [tensor.name for tensor in expected if tensor.name not in tensors]:
        raise ModelLoadError(f"the weights lack {_some(missing)}, which {architecture} needs{why}")
    if unknown := [name for name in named if name not in names]:
        raise ModelLoadError(
            f"the weights hold {_some(unknown)}, which this {architecture} does not have: "
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
    """Whether a tensor is computed here anyway, or is a second name of the embedding table, or of keys and values
    in whose place those of another layer are.
    """
    if _is_unread(name, config.weight_format is not None):
        return True
    if name.endswith("rotary_emb.inv_freq") or (name.endswith(HEAD) and config.tied_embeddings):
        return True
    return any(layer.kv_of is not None and is_kv_of(name, index) for index, layer in enumerate(config.layers))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _is_unread(name: str, is_quantized: bool) -> bool:
    """Whether `name` is a tensor of scales or places that a checkpoint, quantized or plain, has without need."""
    return name.rpartition(".")[2] in (*_KV_SCALES, *(_UNREAD if is_quantized else ()))
