"""The scales of KV in eight bits: each layer's keys, and its values, by the largest that a sample of tokens has.

float8_e4m3fn is as exact near 1/64 as near 448: what matters is that nothing is larger, so there is room above the
sample's largest. A scale is a power of two: multiplying with it rounds nothing.
"""

from __future__ import annotations

import math
from typing import cast

from cache import Namespace
from engine.attention.kv_pages import MAX_FP8, KVPages
from engine.models.decoder import Decoder, Layer
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.plan import Chunk, StepPlan

_MAX_TOKENS = 512
_HEADROOM = 4.0
"""Times the sample's largest that must fit; rounding the scale up makes it up to twice as much."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class Calibration:
    """A prompt of tokens from all over the vocabulary, computed once with unrounded KV."""

    def __init__(self, vocab_size: int, page_size: int, max_tokens: int) -> None:
        """At most `max_tokens` tokens; the same ones on each replica, so that their scales are the same."""
        length = min(_MAX_TOKENS, max_tokens)
        tokens = [int(index * _GOLDEN % 1 * vocab_size) for index in range(length)]
        self.num_pages = -(-length // page_size)
        sampling, namespace = SamplingParams(max_tokens=1), Namespace("kv-scales")
        request = Request.make("kv-scales", tokens, sampling, arrival=0.0, seed=0, namespace=namespace)
        chunk = Chunk(request, 0, length, tokens, range(self.num_pages), samples=False)
        self.plan = StepPlan((chunk,))

    def set_scales(self, decoder: Decoder, pages: KVPages) -> None:
        """Give the decoder's layers the scales for what the plan left in the pages."""
        largest = pages.data.abs().amax(dim=(2, 3, 4, 5)).tolist()
        for layer, (keys, values) in zip(decoder.layers, largest, strict=True):
            cast("Layer", layer).attention.kv_scales = _scale(keys), _scale(values)


def _scale(largest: float) -> float:
    """The least power of two with which `largest` times the headroom fits; 1 for nothing, and for no number."""
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _HEADROOM / MAX_FP8))
