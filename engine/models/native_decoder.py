"""The decoder as one native call per step, for CPUs. It computes the same as `engine/models/decoder.py`.

Weights are packed for the kernels, tensor by tensor; only an embedding table of plain numbers keeps its layout,
for lookups. Activations and KV have the model's type; the residual stream is float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from engine.attention.base import AttentionStep
from engine.attention.kv_pages import KVPages
from engine.attention.layer_groups import steps_of
from engine.attention.native import NativeStep
from engine.base.host_memory import untouched_zeros
from engine.kernels import native
from engine.layers.grouped_linear import GroupedLinear
from engine.layers.operations import Rotary
from engine.model_config.config import ModelConfig
from engine.model_config.layer_groups import Place
from engine.model_parts.experts_config import ExpertsConfig
from engine.models.decoder import Attention, Decoder, Layer
from engine.models.experts import Experts
from engine.models.mlp import MLP
from engine.settings.config import Quantization

_MOST_EXPERTS = 1024
"""Most experts of a layer, as in experts.c."""


def unsupported(config: ModelConfig, num_ranks: int = 1) -> str | None:
    """Return why the native decoder cannot compute such a model on so many ranks; None when it can."""
    if num_ranks > 1:
        return f"tensor_parallel_size is {num_ranks}, and it computes a step in one call on one rank"
    if missing := _missing(config):
        return f"the native decoder does not compute {', '.join(missing)}"
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
    }
    if (experts := config.experts) is not None:
        if experts.num_experts > _MOST_EXPERTS:
            return f"it computes at most {_MOST_EXPERTS} experts of a layer"
        sizes |= {"inner size of experts": experts.intermediate_size, "of shared experts": experts.shared_size}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 32]
    return f"{', '.join(odd)}: not a multiple of 32" if odd else None


def _missing(config: ModelConfig) -> list[str]:
    """Return the parts of such a model that the native decoder lacks."""
    attention, experts, stored = config.attention, config.experts, config.weight_format
    parts = {
        "gated delta nets": config.delta_net is not None,
        "latent KV (MLA)": attention.latent is not None,
        "layers with different heads": len(config.kinds_of_heads) > 1,
        "keys and values of other layers": any(layer.kv_of is not None for layer in config.layers),
        "norms of heads without weights": attention.qk_norm == "unit" or attention.norms_values,
        "gates of attention": attention.has_output_gate,
        "attention within chunks": config.chunk is not None,
        "queries scaled by position": attention.later_scale is not None,
        "scaled layers": config.norms.scales_layers,
        "embeddings for single layers": config.inputs is not None,
        "experts next to an MLP": experts is not None and experts.are_next_to_mlp,
        "scaled inputs of experts": experts is not None and experts.scales_inputs,
        "gates of shared experts": experts is not None and experts.shared_is_gated,
        f"weights that stay in {stored.name if stored else ''}": config.is_kept_quantized,
    }
    return [name for name, is_there in parts.items() if is_there]


class NativeDecoder:
    """A decoder's packed weights and the workspace of its steps. For one thread at a time."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        """Pack the weights of `decoder`, float32 or bfloat16 (`dtype`) on a CPU. Each layer's original weights are
        freed once packed, so that memory never holds all of them twice. Raises native.NativeUnavailable.
        """
        self.config, self.inner_layers = decoder.config, decoder.inner_layers
        config = self.config
        self._quantization = quantization
        self._dtype = dtype
        self._kernels = native.kernels(self._dtype)
        self._kept: list[object] = []  # The structs point to these.
        grouped = [module for module in decoder.modules() if isinstance(module, GroupedLinear)]
        self._packed = untouched_zeros(
            sum(self._packed_bytes(weight, is_plain) for weight, is_plain in _all(decoder))
            + sum(_whole_lines(module.packed_bytes) for module in grouped)
        )
        self._num_packed = 0  # Bytes of `_packed` in use.
        self._layers = (native.NativeLayer * config.num_layers)(
            *(
                self._take(cast("Layer", layer), kind.window, config.ropes.index(kind.rope))
                for layer, kind in zip(decoder.layers, config.layers, strict=True)
            )
        )
        rotary = Rotary.of(config.ropes, config.head_dim, self._dtype, torch.device("cpu"))
        table: torch.nn.Module = decoder.embed
        self._embed: torch.Tensor | None = None
        packed_table = self._matrix(table) if isinstance(table, GroupedLinear) else native.NativeLinear()
        if isinstance(table, torch.nn.Embedding):
            self._embed = table.weight.detach().contiguous()
        if decoder.lm_head is not None:
            head = self._matrix(decoder.lm_head)
        else:
            head = packed_table if self._embed is None else self._linear(self._embed, None)
        self._model = native.NativeModel(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.mlp.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_ropes=len(config.ropes),
            norm_eps=config.stream_eps,
            own_eps=config.norms.eps,
            attention_scale=config.attention.scale,
            soft_cap=config.attention.soft_cap or 0.0,
            inv_freq=self._floats(rotary.inv_freq),
            rope_factors=self._floats(rotary.factor),
            embed=None if self._embed is None else self._embed.data_ptr(),
            table=packed_table,
            embedding_scale=config.embedding_scale if self._embed is None else 1.0,
            layers=self._layers,
            norm=self._floats(decoder.norm.weight.float() * config.scales.logits),
            head=head,
            is_gelu=config.mlp.activation == "gelu_tanh",
            norms_all_heads=config.attention.qk_norm == "full",
        )
        if config.embedding_scale != 1 and self._embed is not None:  # The output head has its own copy by now.
            self._embed.mul_(config.embedding_scale)
        self._norm = decoder.norm.weight.detach().float().contiguous()
        self._workspace = native.Workspace()
        self._places: Sequence[Place] = ()
        self._hidden = torch.empty(1 + len(self.inner_layers), 0, config.hidden_size)
        self._logits = torch.empty(0, config.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices and of the embedding table."""
        return self._num_packed + (0 if self._embed is None else self._embed.nbytes)

    def __call__(
        self, token_ids: torch.Tensor, step: AttentionStep, pages: KVPages, received: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map int64 [N] token ids, or the hidden states `received` from the stage before, to hidden states,
        float32 [N, hidden_size], or more with `Decoder.inner_layers`, which the next call overwrites.
        """
        kernels, threads = self._kernels, torch.get_num_threads()
        if self._places is not pages.places:
            self._follow(pages)
        steps = [cast("NativeStep", each) for each in steps_of(step)]
        batches = (native.NativeBatch * len(steps))(*(each.struct for each in steps))
        batches[0].token_ids = token_ids.data_ptr() if received is None else None
        layers = native.pages_struct(pages.data)
        arguments = ctypes.byref(self._model), ctypes.byref(batches)
        size = kernels.forward_bytes(*arguments, threads)
        num_tokens = token_ids.shape[0]
        if self._hidden.shape[1] < num_tokens:
            self._hidden = torch.empty(len(self._hidden), num_tokens * 5 // 4, self.config.hidden_size)
            for layer, inner in zip(self.inner_layers, self._hidden[1:], strict=True):
                self._layers[layer].before = inner.data_ptr()
        if received is not None:
            self._hidden[0, :num_tokens] = received
        kernels.forward(
            *arguments, ctypes.byref(layers), self._workspace.address(size), self._hidden.data_ptr(), threads
        )
        if not self.inner_layers:
            return self._hidden[0, :num_tokens]
        return torch.cat([*self._hidden[:, :num_tokens]], -1)

    def _follow(self, pages: KVPages) -> None:
        """Update the addresses of the layers' pages."""
        for layer, place in zip(self._layers, pages.places, strict=True):
            layer.table, layer.number = place.group, place.number
        self._model.num_tables, self._places = pages.num_groups, pages.places

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of R tokens to float32 [R, hidden_size], normed as for logits."""
        last = hidden[:, : self.config.hidden_size].float()
        return torch.nn.functional.rms_norm(last, self._norm.shape, self._norm, self.config.stream_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states of R tokens to float32 [R, vocab_size], which the next call overwrites."""
        if self.inner_layers:
            hidden = hidden[:, : self.config.hidden_size]
        rows, hidden = hidden.shape[0], hidden.contiguous()
        if rows == 0:  # The kernels' threads would wait forever for the end of a phase without work.
            return self._logits[:0]
        if self._logits.shape[0] < rows:
            self._logits = torch.empty(rows * 5 // 4 + 1, self.config.vocab_size)
        size = -(-rows // 16) * 16 * self.config.hidden_size * self._dtype.itemsize
        self._kernels.logits(
            ctypes.byref(self._model),
            hidden.data_ptr(),
            rows,
            self._workspace.address(size),
            self._logits.data_ptr(),
            torch.get_num_threads(),
        )
        if (cap := self.config.scales.logits_cap) is not None:
            self._logits[:rows].div_(cap).tanh_().mul_(cap)
        return self._logits[:rows]

    def _take(self, layer: Layer, window: int | None, rope: int) -> native.NativeLayer:
        packed = self._layer(layer, window, rope)
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.data = torch.empty(0)
        return packed

    def _layer(self, layer: Layer, window: int | None, rope: int) -> native.NativeLayer:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, Attention)
        packed = native.NativeLayer(
            input_norm=self._weights_of(layer.input_norm),
            post_norm=self._weights_of(layer.post_norm),
            attended_norm=self._weights_of(layer.attended_norm),
            output_norm=self._weights_of(layer.output_norm),
            qk_norm=None if attention.qk_norm is None else self._floats(attention.qk_norm),
            qkv=self._matrix(attention.qkv_proj),
            output=self._matrix(attention.o_proj),
            sinks=None if attention.sinks is None else self._floats(attention.sinks),
            window=window or 0,
            rope=rope,
        )
        if isinstance(mlp, MLP):
            packed.gate_up, packed.down = self._mlp(mlp)
        else:
            assert self.config.experts is not None and isinstance(mlp, Experts)
            experts = self._experts(mlp, self.config.experts)
            self._kept.append(experts)
            packed.experts = ctypes.pointer(experts)
        return packed

    def _mlp(self, mlp: MLP) -> tuple[native.NativeLinear, native.NativeLinear]:
        return self._matrix(mlp.gate_up_proj, is_gated=True), self._matrix(mlp.down_proj)

    def _experts(self, experts: Experts, config: ExpertsConfig) -> native.NativeExperts:
        router = self._linear(experts.router, experts.router_bias, is_plain=True)
        gate_up = self._stack(experts.gate_up_proj, experts.gate_up_bias, is_gated=True)
        down = self._stack(experts.down_proj, experts.down_bias)
        if config.clamp is not None:
            for linear in gate_up:
                linear.alpha, linear.limit = config.clamp.alpha, config.clamp.limit
        packed = native.NativeExperts(
            router=router,
            correction=None if experts.correction is None else self._floats(experts.correction),
            gate_up=gate_up,
            down=down,
            num_experts=config.num_experts,
            per_token=config.per_token,
            intermediate=config.intermediate_size,
            shared_intermediate=config.shared_size,
            num_groups=config.num_groups,
            groups_per_token=config.groups_per_token,
            scaling=config.scaling,
            is_sigmoid=config.is_sigmoid,
            renormalizes=config.renormalizes,
            is_clamped=config.clamp is not None,
        )
        if experts.shared is not None:
            packed.shared_gate_up, packed.shared_down = self._mlp(experts.shared)
        return packed

    def _stack(
        self, weights: torch.Tensor, biases: torch.Tensor | None, is_gated: bool = False
    ) -> ctypes.Array[native.NativeLinear]:
        """Pack a stack of matrices, [E, outputs, inputs]."""
        each = [None] * len(weights) if biases is None else list(biases)
        packed = (self._linear(weight, bias, is_gated) for weight, bias in zip(weights, each, strict=True))
        stack = (native.NativeLinear * len(weights))(*packed)
        self._kept.append(stack)
        return stack

    def _weights_of(self, norm: torch.nn.RMSNorm | None) -> int | None:
        return None if norm is None else self._floats(norm.weight)

    def _matrix(self, layer: torch.nn.Module, is_gated: bool = False) -> native.NativeLinear:
        """Pack a layer's matrix, in blocks if it has codes in groups."""
        if not isinstance(layer, GroupedLinear):
            assert isinstance(layer, torch.nn.Linear)
            return self._linear(layer.weight, layer.bias, is_gated)
        groups, packed = native.NativeGrouping(*layer.grouping), self._packed[self._num_packed :]
        self._num_packed += _whole_lines(layer.packed_bytes)
        leasts = layer.leasts.data_ptr() if groups.has_leasts else None
        shape = layer.out_features, layer.in_features
        self._kernels.pack_blocks(
            layer.codes.data_ptr(),
            layer.scales.data_ptr(),
            leasts,
            ctypes.byref(groups),
            *shape,
            is_gated,
            packed.data_ptr(),
        )
        bias = None if layer.bias is None else self._floats(layer.bias)
        return native.NativeLinear(packed.data_ptr(), None, bias, *shape, groups=groups)

    def _linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None, is_gated: bool = False, is_plain: bool = False
    ) -> native.NativeLinear:
        """Pack a matrix [outputs, inputs]; one that `is_plain` is not quantized."""
        weight = weight.detach().contiguous()
        outputs, inputs = weight.shape
        packed = self._packed[self._num_packed :]
        self._num_packed += self._packed_bytes(weight, is_plain)
        arguments = weight.data_ptr(), outputs, inputs, is_gated, packed.data_ptr()
        scales = None
        if self._quantization is None or is_plain:
            self._kernels.pack(*arguments)
        else:
            scales = self._floats(torch.empty(outputs))
            self._kernels.pack_int8(*arguments, scales)
        return native.NativeLinear(
            packed.data_ptr(), scales, bias if bias is None else self._floats(bias), outputs, inputs
        )

    def _packed_bytes(self, weight: torch.Tensor, is_plain: bool = False) -> int:
        """Return the bytes of packed matrices [..., outputs, inputs]: a multiple of 64, since inputs are of 32."""
        item = weight.element_size() if self._quantization is None or is_plain else 1
        *stacked, outputs, inputs = weight.shape
        return math.prod(stacked) * -(-outputs // 32) * 32 * inputs * item

    def _floats(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _whole_lines(num_bytes: int) -> int:
    """Return the bytes of the cache lines that so many bytes take."""
    return -(-num_bytes // 64) * 64


def _all(decoder: Decoder) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield all matrices, or stacks of them, to pack, and whether they are plain: never quantized."""
    for module in decoder.modules():
        if isinstance(module, torch.nn.Linear):
            yield module.weight, False
        elif isinstance(module, Experts):
            yield module.router, True
            yield module.gate_up_proj, False
            yield module.down_proj, False
    if decoder.lm_head is None and isinstance(decoder.embed, torch.nn.Embedding):
        yield decoder.embed.weight, False
