"""Samples the next token of each request from the model's logits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence

import torch

from engine.kernels import native
from engine.sampling.beam_candidates import beam_candidates, is_beam_row
from engine.sampling.chooser import Chooser, TorchChooser
from engine.sampling.masks import GrammarMasks
from engine.sampling.native import NativeSampler
from engine.sampling.sampled_logprobs import SampledLogprobs
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_row import SamplingRow

logger = logging.getLogger(__name__)


class Sampler:
    """Samples one token per row. Stateless: noise is a function of (seed, position), penalties of the request.

    The order of operations, row by row:
    1. Log-probabilities are taken from the model's own logits.
    2. Penalties, bias and forbidden ends are applied (`engine.sampling.adjust`).
    3. Tokens that the request's grammar forbids become impossible (`engine.sampling.masks`).
    4. With temperature 0, the most likely token is chosen, the lowest id among equals.
    5. Otherwise temperature, top-k, top-p and min-p apply (`engine.sampling.distribution`), and noise draws.

    A chooser does 2, 4 and 5: torch's runs everywhere, Triton's on GPUs. On a CPU `engine.sampling.native` does
    all of it in one call if it was built; torch's chooser is the reference for both.

    Rows of a beam search are log-probabilities from the start; the search gets the best ones after operation 2.
    """

    def __init__(self, eos_token_ids: Collection[int], chooser: Chooser | None = None) -> None:
        """`chooser`: None for torch's."""
        self._eos = frozenset(eos_token_ids)
        self._chooser = chooser or TorchChooser()
        self._masks = GrammarMasks(self._eos)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """Return one token per row, int64 [R] on the logits' device, and log-probabilities where requested.

        logits: float32 [R, V], overwritten; row r belongs to rows[r]. A row without a valid choice gets -1 or a
        `GrammarFailure`, and no log-probabilities; it does not affect the other rows.
        """
        own = SampledLogprobs(logits, rows)
        searching = [index for index, row in enumerate(rows) if is_beam_row(row)]
        if searching:
            logits[searching] = torch.log_softmax(logits[searching].float(), dim=-1)
        self._chooser.adjust(logits, rows, self._eos)
        failed = self._masks.apply(logits, rows)
        chosen = self._chooser.choose(logits, rows)
        for row, failure in failed.items():
            chosen[row] = failure
        reports = own.report(logits, chosen)
        if searching:
            found = beam_candidates(logits[searching], [rows[index] for index in searching])
            for index, report, token in zip(searching, found, chosen[searching].tolist(), strict=True):
                reports[index] = report if token >= 0 else None
        return chosen, reports


def sampler_for(eos_token_ids: Collection[int], device: torch.device) -> Sampler | NativeSampler:
    """Return the native sampler on a CPU if the library was built, one with Triton on a GPU if it imports."""
    if device.type == "cpu":
        with contextlib.suppress(native.NativeUnavailable):
            return NativeSampler(eos_token_ids, native.kernels(torch.float32))
    if device.type == "cuda":
        try:
            from engine.sampling.triton_chooser import TritonChooser

            return Sampler(eos_token_ids, TritonChooser())
        except ImportError as error:
            logger.warning("tokens are chosen by plain torch, which is slower: %s; install triton", error)
    return Sampler(eos_token_ids)
