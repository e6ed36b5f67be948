"""Descriptions of the parts that the one decoder is composed of. A model family is a choice among them.

    ModelConfig ─┬─ attention   heads, scale, biases, norms of queries and keys     one for all layers
                 ├─ delta_net   heads, convolution                                  of the recurrent layers
                 ├─ layers      window and rotation, or recurrence                  one of each layer
                 ├─ mlp         inner size, activation, biases                      of the dense layers
                 ├─ experts     router, number and size of experts                  of the sparse layers
                 ├─ norms       where a layer norms, and how
                 ├─ inputs      a second embedding of each token                    a part for each layer
                 └─ scales      constant factors of embeddings, residuals, logits

Nothing here imports torch. Every default is that of Llama.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine.model_parts.experts_config import ExpertsConfig
from engine.model_parts.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]
"""Activation of the gate: SiLU, or GELU by its tanh approximation (Hendrycks and Gimpel 2016,
arXiv:1606.08415)."""
QKNorm = Literal["none", "heads", "full", "unit"]
"""RMS norms of queries and keys before rotation: none; each head by itself; all heads of a token together; each
head by itself and without weights, in layers with a rotation."""


@dataclass(frozen=True, slots=True)
class LaterScale:
    """Queries are multiplied by 1 + beta * ln(1 + floor((position + first) / period)) (Llama 4, Ministral 3)."""

    beta: float
    period: int
    first: int = 0
    """The number of the first position."""
    is_of_unturned: bool = False
    """Whether this applies only to layers without a rotation."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Attention whose query heads share keys and values (Ainslie et al. 2023, arXiv:2305.13245)."""

    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key and value heads; equal to `num_heads` (MHA), a divisor (GQA) or 1 (MQA)."""
    head_dim: int
    scale: float
    """Factor of the scores before the softmax."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = "none"
    soft_cap: float | None = None
    """Scores are cap * tanh(score / cap) (Gemma 2, arXiv:2408.00118); None: unchanged."""
    has_sinks: bool = False
    """Whether each head has a sink: a score in the softmax without a value (gpt-oss)."""
    later_scale: LaterScale | None = None
    """The factor of queries at later positions; None: no factor."""
    has_output_gate: bool = False
    """Whether outputs are multiplied by the sigmoid of a gate, which is projected with the queries
    (Qwen3-Next)."""
    norms_values: bool = False
    """Whether each head's values are normed separately and without weights (Gemma 4)."""
    projects_keys: bool = True
    """Whether it has its own keys and values, not those of an earlier layer (`LayerKind.kv_of`)."""
    projects_values: bool = True
    """Whether values have their own projection; otherwise they are the keys before norm and rotation."""

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a token's KV in one layer: (keys and values, heads, numbers per head)."""
        return 2, self.num_kv_heads, self.head_dim

    @property
    def latent(self) -> int | None:
        """How many of a key's numbers are also its value (`LatentAttentionConfig`); None: values are separate."""
        return None

    @property
    def turned_dim(self) -> int:
        """Numbers of a head that contain those that positions rotate."""
        return self.head_dim

    @property
    def qkv_outputs(self) -> int:
        """Outputs of the fused projection to queries, keys and values, and to gates."""
        kv_heads = (self.projects_keys + self.projects_values) * self.num_kv_heads
        return ((1 + self.has_output_gate) * self.num_heads + kv_heads) * self.head_dim

    @property
    def normed_heads(self) -> int:
        """Number of a token's query and key heads that may be normed: those that it projects."""
        return self.num_heads + self.projects_keys * self.num_kv_heads

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """List (outputs, inputs) of one layer's projections that may be quantized."""
        return [(self.qkv_outputs, hidden_size), (hidden_size, self.num_heads * self.head_dim)]

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        query, qkv = self.num_heads * self.head_dim, self.qkv_outputs
        normed = {"heads": (1 + self.projects_keys) * self.head_dim, "full": self.normed_heads * self.head_dim}
        biases = qkv * self.qkv_bias + hidden_size * self.output_bias + self.num_heads * self.has_sinks
        return (qkv + query) * hidden_size + biases + normed.get(self.qk_norm, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """Multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1), in the form in which pages
    hold it: all heads share one key for each token, of `rank` compressed numbers and `rope_dim` numbers rotated by
    its position, and the compressed numbers are also its value. `head_dim` is the size of that key, `num_kv_heads`
    is 1.
    """

    rank: int
    """Size of the compressed key and value (kv_lora_rank)."""
    rope_dim: int
    """Numbers of a head that positions rotate (qk_rope_head_dim)."""
    plain_dim: int
    """The other numbers of a head's key, before compression (qk_nope_head_dim)."""
    value_dim: int
    """Numbers of a head's value, before compression (v_head_dim)."""
    query_rank: int | None
    """Size of the compressed query (q_lora_rank); None if it is not compressed."""
    is_interleaved: bool = True
    """Whether the two numbers of a rotated pair are adjacent in files."""

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """One key, whose first numbers are the value."""
        return 1, 1, self.head_dim

    @property
    def latent(self) -> int | None:
        """Implement `AttentionConfig`."""
        return self.rank

    @property
    def turned_dim(self) -> int:
        """Implement `AttentionConfig`."""
        return self.rope_dim

    @property
    def query_outputs(self) -> int:
        """Outputs of the files' projection to all heads' queries."""
        return self.num_heads * (self.plain_dim + self.rope_dim)

    @property
    def qkv_outputs(self) -> int:
        """Outputs of the fused projection to queries, compressed or not, and to the key."""
        return (self.query_outputs if self.query_rank is None else self.query_rank) + self.head_dim

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """Implement `AttentionConfig`."""
        queries = [] if self.query_rank is None else [(self.query_outputs, self.query_rank)]
        return [(self.qkv_outputs, hidden_size), *queries, (hidden_size, self.num_heads * self.value_dim)]

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        expansion = self.num_heads * (self.plain_dim + self.value_dim) * self.rank
        biases = self.qkv_outputs * self.qkv_bias + hidden_size * self.output_bias
        matrices = sum(outputs * inputs for outputs, inputs in self.matrices(hidden_size))
        return matrices + expansion + biases + self.rank + (self.query_rank or 0)


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers that keep a state of constant size instead of KV: gated delta nets (Yang et al. 2024,
    arXiv:2412.06464).
    """

    num_key_heads: int
    """Heads of queries and of keys."""
    num_value_heads: int
    """Heads of values, each with its own state; consecutive ones share a key head."""
    key_dim: int
    """Numbers of a query's or a key's head."""
    value_dim: int
    kernel: int
    """Positions that the convolution over queries, keys and values sees, including the current one."""

    @property
    def channels(self) -> int:
        """Numbers of a token's queries, keys and values together, which the convolution mixes over time."""
        return 2 * self.num_key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of a token's values in all heads."""
        return self.num_value_heads * self.value_dim

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """List (outputs, inputs) of one layer's projections that may be quantized."""
        return [(self.channels + self.values, hidden_size), (hidden_size, self.values)]

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        matrices = sum(outputs * inputs for outputs, inputs in self.matrices(hidden_size))
        gates = 2 * self.num_value_heads * (hidden_size + 1)
        return matrices + gates + self.channels * self.kernel + self.value_dim

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of one layer's state: the last inputs of the convolution, and a matrix for each head,
        which is always float32.
        """
        matrices = self.num_value_heads * self.key_dim * self.value_dim
        return self.channels * (self.kernel - 1) * element_bytes + 4 * matrices

    def draft_bytes(self, element_bytes: int) -> int:
        """Return the bytes that one layer keeps of a draft token until it is verified."""
        return (self.channels + 2 * self.num_value_heads) * element_bytes


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The properties in which layers' attention may differ."""

    rope: RopeConfig | None
    """How positions rotate queries and keys; None if they do not (NoPE)."""
    window: int | None = None
    """Number of last positions to which a query attends, including its own; None for all."""
    chunk: int | None = None
    """A query attends to positions from the last multiple of this on; None for all. Layers with chunks have equal
    ones, and no window."""
    is_recurrent: bool = False
    """Whether it is not attention but a gated delta net (`DeltaNetConfig`), which has none of these."""
    attention: AttentionConfig | None = None
    """Its heads, if they differ from those of the other layers (Gemma 4)."""
    kv_of: int | None = None
    """The layer whose keys and values it attends to; None: its own."""
    mlp: MLPConfig | None = None
    """Its MLP, if it differs from that of the other layers."""

    def for_context(self, num_tokens: int) -> LayerKind:
        """Return the layer for contexts of at most so many tokens."""
        rope = None if self.rope is None else self.rope.for_context(num_tokens)
        is_cut = self.chunk is not None and self.chunk < num_tokens
        return replace(self, rope=rope, chunk=self.chunk if is_cut else None)

    def turning_neighbours(self) -> LayerKind:
        """Return the layer of files in which the two numbers of a rotated pair are adjacent."""
        return replace(self, rope=None if self.rope is None else replace(self.rope, is_interleaved=True))


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of weights of one layer."""
        inner = self.intermediate_size
        return 3 * hidden_size * inner + (2 * inner + hidden_size) * self.bias


@dataclass(frozen=True, slots=True)
class LayerInputsConfig:
    """A second embedding of each token, with a part that each layer adds after its MLP (Gemma 3n and 4)."""

    size: int
    """Numbers of a token's part for one layer."""
    vocab_size: int

    def num_parameters(self, hidden_size: int, num_layers: int) -> int:
        """Return the number of weights: the table, its projection and norm, and the layers' branches."""
        shared = self.num_shared(hidden_size, num_layers) + self.size
        return shared + num_layers * (2 * self.size * hidden_size + hidden_size)

    def num_shared(self, hidden_size: int, num_layers: int) -> int:
        """Return the number of weights of the table and its projection for so many layers."""
        return num_layers * self.size * (self.vocab_size + hidden_size)


@dataclass(frozen=True, slots=True)
class NormConfig:
    """RMS norms (Zhang and Sennrich 2019, arXiv:1910.07467) of the residual stream."""

    eps: float
    before: bool = True
    """Whether the inputs of attention and MLP are normed."""
    after: bool = False
    """Whether the outputs of attention and MLP are normed before they are added (Gemma 2, OLMo 2)."""
    added: float | None = None
    """Number that is added to the files' weights, including those of queries and keys: one (Gemma). The sums are
    kept in float32. None: no addition, and the weights have the model's type."""
    scales_layers: bool = False
    """Whether each layer's output is multiplied by the layer's factor, which is no weight (Gemma 4)."""

    @property
    def per_layer(self) -> int:
        """Number of a layer's norms of the residual stream."""
        return 2 * (self.before + self.after)


@dataclass(frozen=True, slots=True)
class Scales:
    """Constant factors (Granite), and the cap of logits.

    With a residual factor r the stream is stored divided by r, so that layers need not multiply: the embeddings
    are divided by it, and norms, which do not depend on the stream's scale, divide eps by r * r.
    """

    embedding: float = 1.0
    residual: float = 1.0
    """Factor of the outputs of attention and MLP."""
    logits: float = 1.0
    logits_cap: float | None = None
    """Logits are cap * tanh(logit / cap); None: unchanged."""


@dataclass(frozen=True, slots=True)
class ModelParts:
    """All parts of a model, as a family reads them from its config.json."""

    attention: AttentionConfig
    layers: tuple[LayerKind, ...]
    mlp: MLPConfig
    norms: NormConfig
    experts: ExpertsConfig | None = None
    scales: Scales = Scales()
    delta_net: DeltaNetConfig | None = None
    inputs: LayerInputsConfig | None = None
