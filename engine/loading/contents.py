"""Checks the names, shapes and types of a checkpoint's tensors by its files' headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.base.errors import ModelLoadError
from engine.loading.encoder_targets import LEFT_OUT, encoder_prefix
from engine.loading.gemma4_targets import is_kv_of
from engine.loading.mapped_tensors import MappedTensor
from engine.loading.targets import HEAD
from engine.loading.tensor_groups import Expected
from engine.model_config.config import ModelConfig
from engine.model_config.encoder import EncoderConfig

_UNREAD = ("input_scale", "input_global_scale", "activation_scale", "g_idx", "weight_shape")
"""Tensors of quantized matrices that are not needed, because each token's activations have their own scale."""
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
"""Scales for KV in eight bits, also in plain checkpoints. Those of `engine.kv_dtype: fp8` are measured here."""


def check_encoder_tensors(
    tensors: Mapping[str, MappedTensor], expected: Sequence[Expected], config: EncoderConfig
) -> list[str]:
    """Check an encoder's tensors and return the names of unused ones. Raises ModelLoadError."""
    left_out = tuple(f"{encoder_prefix(tensors)}{name}" for name in LEFT_OUT)
    check_tensors(
        tensors, expected, [name for name in tensors if not name.startswith(left_out)], config.architecture
    )
    names = {tensor.name for tensor in expected}
    return [name for name in tensors if name not in names]


def check_decoder_tensors(
    tensors: Mapping[str, MappedTensor], expected: Sequence[Expected], config: ModelConfig
) -> list[str]:
    """Check a decoder's tensors and return the names of unused ones. Raises ModelLoadError."""
    names = {tensor.name for tensor in expected}
    missing = [name for name in names if name not in tensors]
    why = "" if config.weight_format is None else ", stored as its quantization_config says"
    if len(missing) == 1 and missing[0].endswith(HEAD):
        why = " to generate; if it should only embed, set engine.tasks: [embed]"
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
    """Raise ModelLoadError unless a checkpoint has all `expected` tensors in the right form, and no others among
    `named`, the checkpoint's names without unused ones. `why` ends the message about missing ones.
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
            raise ModelLoadError(f"{wanted.name} has shape {tensor.shape}, but {wanted.shape} by config.json")
        if tensor.dtype not in wanted.dtypes:
            raise ModelLoadError(
                f"{wanted.name} is stored as {tensor.dtype}; supported are {', '.join(wanted.dtypes)}"
            )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Whether a tensor can be ignored, because it is computed here, is a second name of the embedding table, or
    has keys and values for which those of another layer are used.
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
    """Whether `name` is a tensor of scales or places that a checkpoint, quantized or plain, does not need."""
    return name.rpartition(".")[2] in (*_KV_SCALES, *(_UNREAD if is_quantized else ()))
