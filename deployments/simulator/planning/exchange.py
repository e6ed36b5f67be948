"""Traffic between the GPUs of a stage that divide the KV of a request into parts (context parallelism).

    decode   each GPU receives the queries of the others with the same heads, attends with them to its own part,
             and receives what theirs gave in the other parts, before the layer continues
    prompt   the earlier KV goes from GPU to GPU while attention computes; in steps of few tokens, queries do

The tokens of a step itself need no exchange, because each GPU computes the keys and values of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model_config.config import ModelConfig
from engine.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class PromptTraffic:
    """Traffic for one token of a prompt, on average."""

    num_bytes: float
    """Bytes that all GPUs of the stage receive together."""
    is_hidden: bool
    """Whether it is on its way while attention computes."""


def query_bytes(rank: ModelConfig, parts: int, element_bytes: int) -> int:
    """Return the bytes that a GPU with these layers receives for a token: the queries of `parts` - 1 others, and
    as many partial results for its own heads, each with a float32 that says how much it weighs.
    """
    attending = (rank.attention_in(index) for index, layer in enumerate(rank.layers) if not layer.is_recurrent)
    return (parts - 1) * sum(
        heads.num_heads * ((heads.head_dim + (heads.latent or heads.head_dim)) * element_bytes + 4)
        for heads in attending
    )


def prompt_traffic(
    engine: EngineConfig, kv_bytes: int, query_bytes: int, prompt_tokens: float, num_computed: float
) -> PromptTraffic:
    """Return the traffic for a prompt, of which `num_computed` tokens are computed, in steps of equal length.

    `kv_bytes` and `query_bytes` are those of a token on all GPUs of the stage together.
    """
    num_steps = math.ceil(num_computed / engine.max_step_tokens)
    in_step, num_cached = num_computed / num_steps, max(0.0, prompt_tokens - num_computed)
    if in_step < engine.ring_attention_tokens:
        after_others = num_steps if num_cached else num_steps - 1
        return PromptTraffic(query_bytes * after_others / num_steps, is_hidden=False)
    num_earlier = num_cached + (num_computed - in_step) / 2
    return PromptTraffic((engine.context_parallel_size - 1) * kv_bytes * num_earlier / in_step, is_hidden=True)
