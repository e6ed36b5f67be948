"""A model's configuration, read from its config.json. Nothing here imports torch or runs a model's own code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from engine.base.errors import ModelLoadError
from engine.gguf.documents import is_gguf
from engine.model_config.registry import family_of
from engine.model_files.json_files import parse_json
from engine.model_parts.config_keys import UnusedKeys, layered
from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.family import WeightNames, text_config
from engine.model_parts.formats import (
    Fp8Format,
    KeptFormat,
    Mxfp4Format,
    WeightFormat,
    is_ignored,
    weight_format,
)
from engine.model_parts.parts import (
    AttentionConfig,
    DeltaNetConfig,
    LayerInputsConfig,
    LayerKind,
    MLPConfig,
    NormConfig,
    Scales,
)
from engine.model_parts.rope import RopeConfig
from engine.text.end_tokens import end_tokens, tokenizer_end

WeightType = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: Mapping[WeightType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model: its size, and the parts of the common decoder that it is composed of."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """The longest context the model supports, in tokens."""
    attention: AttentionConfig
    layers: tuple[LayerKind, ...]
    mlp: MLPConfig
    """The MLP of layers without experts."""
    norms: NormConfig
    scales: Scales
    tied_embeddings: bool
    """Whether the output projection is the embedding table."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text (`engine/text/end_tokens.py`)."""
    dtype: WeightType
    """Type of the checkpoint's weights, or of its unquantized weights if others are quantized."""
    names: WeightNames
    weight_format: WeightFormat | None = None
    """How the layers' matrices are quantized; None for plain numbers."""
    experts: ExpertsConfig | None = None
    """The layers whose MLP is a mixture of experts; None when none is."""
    delta_net: DeltaNetConfig | None = None
    """The layers that keep a state instead of KV; None if none does."""
    inputs: LayerInputsConfig | None = None
    """Inputs of each layer besides the residual stream; None if there are none."""
    unused_keys: UnusedKeys = field(default=UnusedKeys(), compare=False)
    """The keys of config.json that were not read."""

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read config.json, generation_config.json and the tokenizer's end token. Raises ModelLoadError."""
        generation = _read_json(directory / "generation_config.json", optional=True)
        try:
            config = cls.from_file(directory / "config.json", generation)
        except ModelLoadError as error:
            if not is_gguf(directory) or str(directory) in str(error):
                raise
            raise ModelLoadError(f"{directory}: its metadata, read as a config.json: {error}") from None
        end = tokenizer_end(directory)
        return config if end is None else replace(config, eos_token_ids=config.eos_token_ids | {end})

    @classmethod
    def from_file(cls, path: Path, generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read one config.json at any path. Raises ModelLoadError."""
        return cls.from_json(_read_json(path), generation or {}, str(path))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> ModelConfig:
        """Read the contents of a config.json, called `name` in errors. Raises ModelLoadError."""
        try:
            return cls._from_raw(raw, generation)
        except KeyError as missing:
            raise ModelLoadError(f"{name} lacks the key {missing}; download the model again") from None
        except ModelLoadError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError) as error:
            raise ModelLoadError(f"{name} holds a value of the wrong type: {error}") from error

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
        tracked = text_config(raw)
        architecture, family = family_of(tracked)
        parts = family.parts_of(tracked)
        raw = layered(tracked, family.defaults)
        if parts.experts is not None and parts.mlp.activation != "silu" and not parts.experts.are_next_to_mlp:
            raise ModelLoadError(f"unsupported activation of experts: {parts.mlp.activation}; supported is silu")
        stored = None if parts.experts is not None and parts.experts.is_mxfp4 else weight_format(raw)
        longest = max(
            (layer.rope.stretched_context for layer in parts.layers if layer.rope is not None), default=0
        )
        model = cls(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            max_position_embeddings=max(int(raw["max_position_embeddings"]), longest),
            attention=parts.attention,
            layers=parts.layers,
            mlp=parts.mlp,
            norms=parts.norms,
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=end_tokens(generation, raw),
            dtype=weight_type(raw),
            names=family.names,
            weight_format=stored,
            scales=parts.scales,
            experts=_stored_experts(parts.experts, stored, family.names),
            delta_net=parts.delta_net,
            inputs=parts.inputs,
        )
        layout = raw.get("gguf")
        model = model if layout is None else model._as_converted(layout)
        return replace(model, unused_keys=UnusedKeys.of(tracked, "config.json" if layout is None else "the file"))

    def _as_converted(self, layout: Mapping[str, Any]) -> ModelConfig:
        """Return the model as llama.cpp's converter writes it (`engine/gguf/config.py`)."""
        model = self
        if layout["turns_neighbours"]:
            model = replace(model, layers=tuple(layer.turning_neighbours() for layer in model.layers))
        if layout["norms_have_one"]:
            model = replace(model, norms=replace(model.norms, added=0.0))
        return model

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def num_kv_layers(self) -> int:
        """Number of layers that keep KV: all except recurrent ones and those that attend to another one's KV."""
        return sum(layer.kv_of is None for layer in self.layers) - self.num_recurrent_layers

    @property
    def num_recurrent_layers(self) -> int:
        """Number of layers that keep a state."""
        return sum(layer.is_recurrent for layer in self.layers)

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.attention.head_dim

    def attention_in(self, layer: int) -> AttentionConfig:
        """Return the heads of a layer that attends."""
        return self.layers[layer].attention or self.attention

    def mlp_in(self, layer: int) -> MLPConfig:
        """Return the MLP of a layer without experts, or with experts next to it."""
        return self.layers[layer].mlp or self.mlp

    @property
    def attended_numbers(self) -> int:
        """Numbers of a token's queries in all layers."""
        heads = (self.attention_in(index) for index, layer in enumerate(self.layers) if not layer.is_recurrent)
        return sum(each.num_heads * each.head_dim for each in heads)

    @property
    def kinds_of_heads(self) -> Mapping[tuple[int, int, int], tuple[AttentionConfig, frozenset[int | None]]]:
        """The different shapes of layers' keys and values, each with its heads and the windows that occur."""
        found: dict[tuple[int, int, int], tuple[AttentionConfig, frozenset[int | None]]] = {}
        for index, layer in enumerate(self.layers):
            if not layer.is_recurrent:
                heads = self.attention_in(index)
                _, windows = found.get(heads.kv_shape, (heads, frozenset()))
                found[heads.kv_shape] = heads, windows | {layer.window}
        return found or {self.attention.kv_shape: (self.attention, frozenset())}

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a token's KV in each layer, like `AttentionConfig.kv_shape`. If layers' heads differ, all have
        the room of the largest.
        """
        shapes = list(self.kinds_of_heads)
        return shapes[0] if len(shapes) == 1 else (2, 1, max(math.prod(shape[1:]) for shape in shapes))

    @property
    def intermediate_size(self) -> int:
        """Inner size of the MLP of layers without experts."""
        return self.mlp.intermediate_size

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows that occur among the layers; None is full attention."""
        return frozenset(layer.window for layer in self.layers if not layer.is_recurrent)

    @property
    def chunk(self) -> int | None:
        """The size of the chunks within which some layers attend; None if none does."""
        return next((layer.chunk for layer in self.layers if layer.chunk is not None), None)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The different rotations of the layers, in the order of their first layers; None is none."""
        return tuple(rope for rope, _ in self.rotations)

    @property
    def rotations(self) -> tuple[tuple[RopeConfig | None, int], ...]:
        """The rotations with the `turned_dim` of their heads; heads of another size are another rotation."""
        return tuple(
            dict.fromkeys(self.rotation_of(i) for i, layer in enumerate(self.layers) if not layer.is_recurrent)
        )

    def rotation_of(self, layer: int) -> tuple[RopeConfig | None, int]:
        """Return the rotation of a layer."""
        return self.layers[layer].rope, self.attention_in(layer).turned_dim

    @property
    def stream_eps(self) -> float:
        """Epsilon of the norms of the residual stream, which is stored divided by its factor (`Scales`)."""
        return self.norms.eps / self.scales.residual**2

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings as they enter the residual stream."""
        return self.scales.embedding / self.scales.residual

    def for_context(self, num_tokens: int) -> ModelConfig:
        """Return the model for contexts of at most so many tokens, which select longrope's frequencies."""
        return replace(self, layers=tuple(layer.for_context(num_tokens) for layer in self.layers))

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        """Return the experts of a sparse layer, None for a dense one."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def on(self, device: str) -> ModelConfig:
        """Return the model as memory of a "cpu" or a "cuda" device holds it: CPUs widen MXFP4."""
        return self if device != "cpu" or self.experts is None else replace(self, experts=self.experts.widened())

    @property
    def kept_format(self) -> KeptFormat | Mxfp4Format | None:
        """The format of files in which memory holds matrices, or only experts."""
        if self.experts is not None and self.experts.is_mxfp4 and self.experts.are_quantized:
            return Mxfp4Format()
        return self.weight_format if isinstance(self.weight_format, KeptFormat) else None

    @property
    def is_kept_quantized(self) -> bool:
        """Whether memory holds all matrices of layers in the format of the files."""
        return self.weight_format is not None and self.weight_format.is_kept

    def can_be_rounded(self, quantization: str) -> bool:
        """Whether `engine.quantization` can round the weights: plain ones, and for int8 also widened ones."""
        return self.weight_format is None or (quantization == "int8" and not self.is_kept_quantized)

    def check_can_be_rounded(self, quantization: str) -> None:
        """Raise ValueError unless `engine.quantization` can round the weights."""
        if not self.can_be_rounded(quantization):
            raise ValueError(
                f"quantization is {quantization!r}, but the model's weights are quantized already; leave it out, "
                "or use a plain version of the model"
            )

    @property
    def num_parameters(self) -> int:
        """Number of weights in the model; tied ones count once."""
        return round(self._parameters(0 if self.experts is None else self.experts.num_experts))

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses; of the experts, only those to which it is routed."""
        return round(self._parameters(0 if self.experts is None else self.experts.per_token))

    def parameters_read(self, num_tokens: float) -> float:
        """Average number of weights that a step of so many tokens reads: without experts that no token uses."""
        return self._parameters(0 if self.experts is None else self.experts.expected_experts(num_tokens))

    def _parameters(self, experts_each: float) -> float:
        """Number of weights when `experts_each` experts of each sparse layer are counted."""
        hidden = self.hidden_size
        attending = [index for index, layer in enumerate(self.layers) if not layer.is_recurrent]
        mixers = sum(self.attention_in(index).num_parameters(hidden) for index in attending)
        if self.delta_net is not None:
            mixers += self.num_recurrent_layers * self.delta_net.num_parameters(hidden)
        norms = self.num_layers * self.norms.per_layer * hidden
        dense = sum(self.mlp_in(index).num_parameters(hidden) for index in self._dense_layers)
        tables = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        inputs = 0 if self.inputs is None else self.inputs.num_parameters(hidden, self.num_layers)
        total = mixers + norms + dense + tables + inputs + hidden
        if self.experts is None:
            return total
        return total + len(self.experts.layers) * self.experts.num_parameters(hidden, experts_each)

    @property
    def _dense_layers(self) -> list[int]:
        """The layers that have an MLP, with experts next to it or without any."""
        experts = self.experts
        sparse = frozenset() if experts is None or experts.are_next_to_mlp else experts.layers
        return [layer for layer in range(self.num_layers) if layer not in sparse]

    def rounded(self) -> ModelConfig:
        """Return the plain model after rounding by `quantization: fp8`, which includes experts if possible."""
        if self.experts is None or not self.experts.can_be_rounded:
            return self
        return replace(self, experts=replace(self.experts, are_quantized=True))

    def weight_bytes(self, element_bytes: int, quantization: str | None = None) -> int:
        """Return the bytes of all weights in memory, at `element_bytes` per plain number.

        `quantization` is the engine's setting: "fp8" rounds the layers' matrices, "int8" also the output head,
        which it copies if it is the embedding table.
        """
        model, stored = self._in_memory(quantization)
        experts, of_experts = model._matrices_of_experts(), model._format_of_experts(stored)
        matrices = [] if stored is None else model._matrices()
        if quantization == "int8":
            matrices.append((self.vocab_size, self.hidden_size))
        plain = self.num_parameters - sum(map(math.prod, (*matrices, *experts)))
        if quantization == "int8" and self.tied_embeddings:
            plain += self.vocab_size * self.hidden_size
        rounded = 0 if stored is None else sum(stored.matrix_bytes(*shape) for shape in matrices)
        rounded += 0 if of_experts is None else sum(of_experts.matrix_bytes(*shape) for shape in experts)
        return plain * element_bytes + rounded

    def _in_memory(self, quantization: str | None) -> tuple[ModelConfig, KeptFormat | None]:
        """Return the model after rounding by `quantization`, and the format of its matrices; None if plain."""
        if quantization is not None:
            return self.rounded() if quantization == "fp8" else self.on("cpu"), Fp8Format()
        return self, self.weight_format if isinstance(self.weight_format, KeptFormat) else None

    def _matrices(self) -> list[tuple[int, int]]:
        """List (outputs, inputs) of the layers' matrices, except experts."""
        hidden, inners = self.hidden_size, [self.mlp_in(layer).intermediate_size for layer in self._dense_layers]
        attending = [index for index, layer in enumerate(self.layers) if not layer.is_recurrent]
        shared, num_shared = 0, 0
        if self.experts is not None and self.experts.shared_size:
            shared, num_shared = self.experts.shared_size, len(self.experts.layers)
        recurrent = [] if self.delta_net is None else self.delta_net.matrices(hidden)
        return [
            *(matrix for index in attending for matrix in self.attention_in(index).matrices(hidden)),
            *self.num_recurrent_layers * recurrent,
            *(matrix for inner in inners for matrix in ((2 * inner, hidden), (hidden, inner))),
            *num_shared * [(2 * shared, hidden), (hidden, shared)],
        ]

    def _format_of_experts(self, stored: KeptFormat | None) -> KeptFormat | Mxfp4Format | None:
        """Return the format of experts that are quantized in memory, given that of other matrices."""
        return Mxfp4Format() if self.experts is not None and self.experts.is_mxfp4 else stored

    def _matrices_of_experts(self) -> list[tuple[int, int]]:
        """List (outputs, inputs) of experts that are quantized in memory."""
        experts, hidden = self.experts, self.hidden_size
        if experts is None or not experts.are_quantized:
            return []
        inner = experts.intermediate_size
        return [(2 * inner, hidden), (hidden, inner)] * (len(experts.layers) * len(experts.held))

    def expert_weight_bytes(self, element_bytes: int, quantization: str | None = None) -> float:
        """Return the bytes of one weight of an expert in memory, including scales; see `weight_bytes`."""
        model, stored = self._in_memory(quantization)
        shapes, of_experts = model._matrices_of_experts()[:2], model._format_of_experts(stored)
        if not shapes or of_experts is None:
            return element_bytes
        return sum(of_experts.matrix_bytes(*shape) for shape in shapes) / sum(map(math.prod, shapes))

    def bytes_per_expert(self, element_bytes: int, quantization: str | None = None) -> int:
        """Return the bytes of one expert in each sparse layer together; 0 in a model without experts."""
        if self.experts is None:
            return 0
        weights = len(self.experts.layers) * 3 * self.hidden_size * self.experts.intermediate_size
        return round(weights * self.expert_weight_bytes(element_bytes, quantization))

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers, at `element_bytes` per number."""
        return self.num_kv_layers * math.prod(self.kv_shape) * element_bytes

    def state_bytes(self, element_bytes: int, max_drafts: int = 0) -> int:
        """Return the bytes of one request's state in all recurrent layers; 0 if there are none.

        It includes `max_drafts` draft tokens, which are kept until they are verified.
        """
        if self.delta_net is None:
            return 0
        drafts = (max_drafts + 1) * self.delta_net.draft_bytes(element_bytes) if max_drafts else 0
        return self.num_recurrent_layers * (self.delta_net.state_bytes(element_bytes) + drafts)


def _read_json(path: Path, *, optional: bool = False) -> Mapping[str, Any]:
    try:
        value = parse_json(path)
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelLoadError(
            f"no {path.name} in {path.parent}: expected the directory of a Hugging Face-style model "
            "(config.json, *.safetensors, tokenizer.json)"
        ) from None
    except ModelLoadError:
        raise
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} is not readable JSON: {error}; download the model again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return cast("Mapping[str, Any]", value)


def _stored_experts(
    experts: ExpertsConfig | None, stored: WeightFormat | None, names: WeightNames
) -> ExpertsConfig | None:
    """Return the experts; `are_quantized` if memory holds them in the format of their files."""
    if experts is None or stored is None or not stored.is_kept:
        return experts
    if names.experts.are_stacked:
        raise ModelLoadError(
            f"experts that are one tensor for each layer are not supported in {stored.name}: use a version of the "
            "model with plain or MXFP4 experts"
        )
    first = f"model.layers.{min(experts.layers)}.{names.experts.block}.experts.0.{names.experts.gate}"
    return replace(experts, are_quantized=not is_ignored(stored, first))


def weight_type(raw: Mapping[str, Any]) -> WeightType:
    """Read the type of a checkpoint's weights, under its new or its old key. Raises ModelLoadError."""
    named, once = raw.get("dtype"), raw.get("torch_dtype")
    name = str(named or once or "float32").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"unsupported weight type {name!r}; supported are float32, bfloat16 and float16")
    return cast(WeightType, name)
