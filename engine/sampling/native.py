"""The sampler for logits on a CPU: one call of the native library for all rows of a step.

The library reads the rows' parameters from a table with one struct per row. Because the same requests decode from
step to step, the table is rebuilt only when parameters change. A row without penalties costs only its position;
the cost of one with penalties does not depend on the length of its history.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.native import Kernels, SampledRow, Workspace
from engine.sampling.adjust import forbidden_ends, must_continue
from engine.sampling.beam_candidates import beam_candidates
from engine.sampling.masks import Failures, GrammarMasks, Masks
from engine.sampling.token_counts import TokenCounts, is_penalized
from engine.values.logprobs import TokenLogprobs
from engine.values.sampling_params import SamplingParams
from engine.values.sampling_row import SamplingRow

_ROW = np.dtype(SampledRow)


class NativeSampler:
    """Samples the same tokens as `engine.sampling.sampler.Sampler`, unless rounding of float64 sums decides."""

    def __init__(self, eos_token_ids: Collection[int], kernels: Kernels) -> None:
        """`kernels` must be those for float32. For one thread at a time."""
        self._eos = frozenset(eos_token_ids)
        self._masks = GrammarMasks(self._eos)
        self._kernels = kernels
        self._counts = TokenCounts()
        self._workspace = Workspace()
        self._table = _Table([])

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[torch.Tensor, list[TokenLogprobs | None]]:
        """Sample as `Sampler.sample` does; each row of `logits` must be contiguous."""
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            raise ValueError(f"logits must be rows of float32, got {logits.dtype} with strides {logits.stride()}")
        params, seeds = [row.request.sampling for row in rows], [row.request.seed for row in rows]
        if params != self._table.params:
            self._table = _Table(params)
        self._table.follow(seeds)
        table, vocab_size = self._table, logits.shape[1]
        table.positions[:] = [row.num_output for row in rows]
        for at in table.searching:
            logits[at] = torch.log_softmax(logits[at], dim=-1)
        pointed_to = [part for at in table.edited for part in self._edit(table, at, rows[at], vocab_size)]
        pointed_to += self._penalize(table, rows, logits)
        masks, failed = self._mask(table, rows)
        tokens = torch.empty(len(rows), dtype=torch.int64)
        reports = _Reports(table, vocab_size)
        threads = torch.get_num_threads()
        self._kernels.sample(
            table.address,
            len(rows),
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            tokens.data_ptr(),
            *reports.addresses,
            self._workspace.address(self._kernels.sample_bytes(vocab_size, threads)),
            threads,
        )
        del pointed_to, masks
        for at, failure in failed.items():
            tokens[at] = failure
        found = reports.read(tokens)
        if table.searching:
            best = beam_candidates(logits[table.searching], [rows[at] for at in table.searching])
            for at, report in zip(table.searching, best, strict=True):
                found[at] = report if tokens[at] >= 0 else None
        return tokens, found

    def _penalize(
        self, table: _Table, rows: Sequence[SamplingRow], logits: torch.Tensor
    ) -> list[npt.NDArray[Any]]:
        """Point structs to the counts that penalties depend on; return the arrays they point to."""
        if not table.penalized:
            return []
        asked = [rows[at] for at in table.penalized]
        slots = np.array(self._counts.follow(asked, logits), dtype=np.int64)
        counts = self._counts.table
        table.rows["counts"][table.penalized] = (
            counts.data_ptr() + slots * counts.stride(0) * counts.element_size()
        )
        tails = [np.array(row.tail, dtype=np.int64) for row in asked]
        table.rows["tail"][table.penalized] = [tail.ctypes.data for tail in tails]
        table.rows["num_tail"][table.penalized] = [len(tail) for tail in tails]
        return tails

    def _edit(self, table: _Table, at: int, row: SamplingRow, vocab_size: int) -> list[npt.NDArray[Any]]:
        """Point a row's struct to its bias and forbidden ends; return the arrays it points to."""
        params, entry = row.request.sampling, table.rows[at]
        edits = {token: bias for token, bias in params.logit_bias.items() if token < vocab_size}
        if must_continue(row):
            ends = forbidden_ends(params, self._eos)
            edits |= {token: -np.inf for token in ends if token < vocab_size}
        edited, added = np.array([*edits], dtype=np.int32), np.array([*edits.values()], dtype=np.float32)
        entry["edited"], entry["edits"], entry["num_edits"] = edited.ctypes.data, added.ctypes.data, len(edits)
        return [edited, added]

    def _mask(self, table: _Table, rows: Sequence[SamplingRow]) -> tuple[Masks, Failures]:
        """Point structs to their grammars' masks; return the masks, and the rows whose grammars failed."""
        constrained, masks, failed = self._masks.fill(rows)
        if table.is_masked:
            table.rows["mask"] = 0
        table.is_masked = bool(constrained)
        if constrained:
            table.rows["mask"][constrained] = masks.ctypes.data + np.arange(len(masks)) * masks.strides[0]
            table.rows["mask_words"] = masks.shape[1]
        return masks, failed


class _Table:
    """The rows' parameters as the library reads them, except those that change with every token."""

    def __init__(self, params: list[SamplingParams]) -> None:
        self.params = params
        self._seeds: list[int] = []
        self.rows = rows = np.zeros(len(params), _ROW)
        self.address: int = rows.ctypes.data
        self.positions = rows["position"]
        self.searching = [at for at, p in enumerate(params) if p.beams is not None]
        self.penalized = [at for at, p in enumerate(params) if is_penalized(p)]
        self.edited = [at for at, p in enumerate(params) if p.logit_bias or p.min_tokens]
        self.counts = {at: p.logprobs for at, p in enumerate(params) if p.logprobs is not None}
        """Number of alternatives to report, for each row that reports log-probabilities."""
        self.is_masked = False
        """Whether some rows still point to masks of the last step."""
        rows["temperature"] = [p.temperature for p in params]
        rows["top_p"], rows["min_p"] = [p.top_p for p in params], [p.min_p for p in params]
        rows["top_k"] = [p.top_k for p in params]
        rows["num_top"], rows["repetition"] = -1, 1.0
        for at in self.searching:
            rows["temperature"][at] = 0.0
        for at in self.penalized:
            penalties = params[at].repetition_penalty, params[at].presence_penalty, params[at].frequency_penalty
            rows["repetition"][at], rows["presence"][at], rows["frequency"][at] = penalties

    def follow(self, seeds: list[int]) -> None:
        """Set the rows' seeds, which differ between requests with equal parameters."""
        if seeds != self._seeds:
            self._seeds = seeds
            self.rows["seed"] = [seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]


class _Reports:
    """Buffers for log-probabilities, if any row asks for them."""

    def __init__(self, table: _Table, vocab_size: int) -> None:
        self._counts, num_rows = table.counts, len(table.params)
        self.addresses: tuple[int, ...] = (0, 0, 0, 0)
        if not self._counts:
            return
        table.rows["num_top"][[*self._counts]] = [min(count, vocab_size) for count in self._counts.values()]
        width = min(max(self._counts.values()), vocab_size)
        self._own = np.empty(num_rows, np.float32)
        self._tokens, self._values = np.empty((num_rows, width), np.int32), np.empty((num_rows, width), np.float32)
        places = (part.ctypes.data for part in (self._own, self._tokens, self._values))
        self.addresses = (*places, width)

    def read(self, chosen: torch.Tensor) -> list[TokenLogprobs | None]:
        """Return one report per row; None if none is requested or no token was chosen."""
        reports: list[TokenLogprobs | None] = [None] * chosen.shape[0]
        for at, count in self._counts.items():
            token = int(chosen[at])
            if token >= 0:
                best = zip(self._tokens[at, :count].tolist(), self._values[at, :count].tolist(), strict=True)
                top = tuple((other, value) for other, value in best if other >= 0)
                reports[at] = TokenLogprobs(token, float(self._own[at]), top)
        return reports
