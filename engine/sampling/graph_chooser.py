"""Chooses tokens inside CUDA graphs, where they may depend only on logits, a few numbers of a row and noise.

All parameters of rows are in tensors and the host is not involved; otherwise as in `engine.sampling.distribution`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.sampling.chooser import INVALID
from engine.sampling.distribution import truncate
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams


class RowParams(NamedTuple):
    """Sampling parameters of rows: [R] each."""

    seeds: torch.Tensor
    """int64: the bits of unsigned integers."""
    inverse: torch.Tensor
    """float64: 1 / temperature, finite; 0 for greedy rows."""
    top_k: torch.Tensor
    """int32; 0 for no limit."""
    top_p: torch.Tensor
    """float64."""
    min_p: torch.Tensor
    """float64."""


class GraphChooser(Protocol):
    """A way to choose tokens without the host."""

    def __call__(
        self, logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool
    ) -> torch.Tensor:
        """Map float32 logits [R, V] and int64 numbers of tokens generated before [R] to int64 tokens [R]; -1 where
        no choice is valid. `cuts`: whether any row with a temperature may have top-k, top-p or min-p.
        """


def fits_forward(chunk: Chunk) -> bool:
    """Whether a graph can compute the logits after a chunk, and its hidden states are not requested."""
    params, position = chunk.request.sampling, chunk.start + chunk.num_tokens
    is_scored = params.prompt_logprobs is not None and position <= chunk.request.num_prompt
    return not is_scored and params.beams is None


def fits_graph(chunk: Chunk) -> bool:
    """Whether a graph can also choose the token after such a chunk, and nothing else is requested."""
    request = chunk.request
    if not fits_forward(chunk) or request.sampling.logprobs is not None:
        return False
    return fits_chooser(request, chunk.start + chunk.num_tokens)


def fits_chooser(request: Request, num_tokens: int) -> bool:
    """Whether a graph can choose the token after so many of a request's."""
    params = request.sampling
    is_free = request.constraint is None and num_tokens - request.num_prompt >= params.min_tokens
    return is_free and _has_graph_params(params)


def fits_masked_graph(chunk: Chunk) -> bool:
    """Like `fits_graph`, but also with a grammar: a graph applies its mask, which includes `min_tokens`."""
    request = chunk.request
    if request.constraint is None:
        return fits_graph(chunk)
    params = request.sampling
    return fits_forward(chunk) and params.logprobs is None and _has_graph_params(params)


def is_cut(params: SamplingParams) -> bool:
    """Whether only a part of the vocabulary may be chosen, for which a graph needs more kernels."""
    return not params.is_greedy and bool(params.top_k or params.top_p < 1.0 or params.min_p)


def _has_graph_params(params: SamplingParams) -> bool:
    return not (
        params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
    )


def inverse_temperature(params: SamplingParams) -> float:
    """Return 1 / temperature, finite; 0 for greedy requests."""
    return 0.0 if params.is_greedy else float(min(1 / params.temperature, np.finfo(np.float64).max))


def torch_graph_chooser(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool
) -> torch.Tensor:
    """Implement `GraphChooser` in plain torch."""
    best, most_likely = logits.max(-1)  # NaN and infinity win the maximum
    weights = ((logits.double() - best.double()[:, None]) * params.inverse[:, None]).exp()
    if cuts:
        weights, _ = truncate(weights, params.top_k[:, None], params.top_p[:, None])
        weights = torch.where(weights >= params.min_p[:, None], weights, 0.0)  # The largest is 1.
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:]
    # See `engine.sampling.distribution.draw`.
    below = torch.nextafter(total, torch.zeros_like(total))
    wanted = torch.minimum(_uniform(params.seeds, positions)[:, None] * total, below)
    drawn = torch.searchsorted(cumulated, wanted, right=True)[:, 0]
    return torch.where(torch.isfinite(best), torch.where(params.inverse > 0, drawn, most_likely), INVALID)


def graph_chooser_for(device: torch.device) -> GraphChooser:
    """Return Triton's chooser on a GPU where Triton imports, else torch's."""
    if device.type == "cuda":
        try:
            return triton_graph_chooser()
        except ImportError:  # A warning was logged when the sampler was chosen.
            pass
    return torch_graph_chooser


def triton_graph_chooser() -> GraphChooser:
    """Return a chooser that uses Triton's kernels. Raises ImportError."""
    from engine.kernels.triton import sample

    def choose(logits: torch.Tensor, params: RowParams, positions: torch.Tensor, *, cuts: bool) -> torch.Tensor:
        return sample.choose(logits, sample.SamplingTensors(*params, draws=True, cuts=cuts), positions)

    return choose


def _uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute `engine.sampling.noise.uniform` in int64 arithmetic, which wraps around like that of uint64."""
    bits = _mix(_mix(seeds + _signed(0x9E3779B97F4A7C15)) + (positions + 1) * _signed(0x9E3779B97F4A7C15))
    return _shifted(bits, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
