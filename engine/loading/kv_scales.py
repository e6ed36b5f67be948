"""The scales of KV in eight bits, for each layer's keys and its values, from the largest of a sample of tokens.

float8_e4m3fn is as exact near 1/64 as near 448. Only values above its maximum do harm, so there is headroom above
the sample's largest. A scale is a power of two, so that multiplying by it rounds nothing.
"""

from __future__ import annotations

import math
from typing import cast

from cache import Namespace
from engine.attention.kv_pages import MAX_FP8, KVPages
from engine.models.decoder import Decoder, Layer
from engine.models.delta_net import GatedDeltaNet
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

_MAX_TOKENS = 512
_HEADROOM = 4.0
"""The multiple of the sample's largest value that must fit; rounding the scale up may double it."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class KVScaleCalibration:
    """A prompt with tokens from the whole vocabulary, which is computed once with unrounded KV."""

    def __init__(self, vocab_size: int, page_size: int, max_tokens: int) -> None:
        """Take at most `max_tokens` tokens, the same on each replica, so that their scales are the same."""
        length = min(_MAX_TOKENS, max_tokens)
        tokens = [int(index * _GOLDEN % 1 * vocab_size) for index in range(length)]
        self.num_pages = -(-length // page_size)
        sampling, namespace = SamplingParams(max_tokens=1), Namespace("kv-scales")
        request = Request.make("kv-scales", tokens, sampling, arrival=0.0, seed=0, namespace=namespace)
        chunk = Chunk(request, 0, length, tokens, range(self.num_pages), samples=False)
        self.plan = StepPlan((chunk,))

    def set_scales(self, decoder: Decoder, pages: KVPages) -> None:
        """Set the scales of the decoder's layers from the KV that the plan left in the pages."""
        largest = iter(pages.data.abs().amax(dim=(2, 3, 4, 5)).tolist())
        mixers = [cast("Layer", layer).attention for layer in decoder.layers]
        for attention, kind in zip(mixers, decoder.config.layers, strict=True):
            if isinstance(attention, GatedDeltaNet):
                continue
            if kind.kv_of is not None:
                source = mixers[kind.kv_of]
                assert not isinstance(source, GatedDeltaNet)
                attention.kv_scales = source.kv_scales
            else:
                parts = next(largest)  # Keys, and values if they are separate.
                attention.kv_scales = _scale(parts[0]), _scale(parts[-1])


def _scale(largest: float) -> float:
    """Return the least power of two by which `largest` times the headroom fits; 1 for 0, NaN and infinity."""
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _HEADROOM / MAX_FP8))
