"""The names of our families' weights in GGUF: llama.cpp's names, and those of safetensors files.

token_embd.weight        model.embed_tokens.weight
blk.3.attn_q.weight      model.layers.3.self_attn.q_proj.weight    ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.base.errors import ModelLoadError
from engine.gguf.files import GGUFModel
from engine.gguf.reader import GGUFTensor

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER: Mapping[str, Mapping[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
"""The names in layers that differ, by architecture."""
_READ_WITH_METADATA = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_TENSOR = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?([a-z0-9_]+)\.(weight|bias)")


def our_names(model: GGUFModel) -> dict[str, GGUFTensor]:
    """Return a model's tensors by their names in safetensors files. Raises ModelLoadError for one without."""
    architecture = model.metadata["general.architecture"]
    in_layers = {**_IN_LAYERS, **_OTHER.get(architecture, {})}
    found, unknown = {}, []
    for name, tensor in model.tensors.items():
        layer, part, kind = match.groups() if (match := _TENSOR.fullmatch(name)) else (None, "", "")
        ours = (_OUTSIDE if layer is None else in_layers).get(part)
        if ours is not None:
            found[f"{ours}.{kind}" if layer is None else f"model.layers.{layer}.{ours}.{kind}"] = tensor
        elif name not in _READ_WITH_METADATA:
            unknown.append(name)
    if unknown:
        raise ModelLoadError(
            f"{model.paths[0]} holds {', '.join(unknown[:3])}{' and more' * (len(unknown) > 3)}, which a model of "
            f"architecture {architecture} does not have: use the model as safetensors"
        )
    return found
