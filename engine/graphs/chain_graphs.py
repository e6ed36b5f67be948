"""Draws the draft tokens of requests without the host: the first one of each from the logits after its own tokens.
Each call of the draft model then starts from the tokens that were drawn last.

    logits ─▶ choice ─▶ rows ─▶ [ layers ─▶ choice ─▶ rows │ layers ─▶ choice ─▶ rows ] ─▶ tokens
                                  a call                     the next one

Several calls are one graph. A row whose draft has ended, or is shorter than others, is computed like them. The
host drops its surplus tokens; their KV goes to unused slots of its last page, or to the page of empty rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.batch import AttentionBatch, block_table
from engine.graphs.device_rows import DeviceRows
from engine.graphs.draft_graphs import draft_sizes
from engine.graphs.row_assignment import (
    IN_USE,
    INVERSE,
    MIN_P,
    NUM_PROMPT,
    POSITION,
    SEED,
    TABLE,
    TOP_K,
    TOP_P,
    RowLayout,
)
from engine.graphs.step_graphs import Capture, StepGraphs, next_size
from engine.sampling.graph_chooser import GraphChooser, fits_chooser, inverse_temperature
from engine.values.request import Request

_MOST_CALLS = 8
"""Most calls of a graph. Longer chains replay several graphs, so that these take no more memory."""

DraftCall = Callable[[torch.Tensor, AttentionBatch, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Maps int64 token ids [R], their batch, and what the call before carried over, [R, C], to logits, float32 [R, V],
and to what this call carries over; writes the tokens' KV."""


class ChainSize(NamedTuple):
    """The size of a graph."""

    rows: int
    calls: int


class ChainStart(NamedTuple):
    """A request to draft for, whose own tokens are computed."""

    request: Request
    position: int
    """Position in its pages of the last of these, or if only the device knows which one is, of the first that it
    may be."""
    num_left_out: int
    """Number of leading tokens of the request that its pages leave out."""
    pages: Sequence[int]
    """Page table of all tokens whose KV the request needs; surplus tokens may lie beyond it."""
    most_later: int = 0
    """By how many positions the last token may be later."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The drafts to draw for some requests. Its tensors are on the host, or all on the device (`to_device`)."""

    num_rows: int
    num_calls: int
    """How many draft tokens follow the first one."""
    fields: torch.Tensor
    """int32: the words of the rows before the page tables (`RowLayout`), except for their tokens."""
    tables: torch.Tensor
    """int32 [R, P]: page tables."""


class ChainGraphs:
    """The graphs of all sizes, for one draft model."""

    def __init__(
        self,
        call: DraftCall,
        sizes: Sequence[ChainSize],
        layout: RowLayout,
        max_len: int,
        choose: GraphChooser,
        carried: torch.Tensor,
        capture: Capture,
    ) -> None:
        """sizes: from `chain_sizes`; max_len: most positions of a row; carried: [max_rows, C], for what a call
        carries over to the next.
        """
        self._call, self._layout, self._max_len, self._choose = call, layout, max_len, choose
        self._rows, self._carried = DeviceRows(layout, carried.device), carried
        self._counts, self._longest = sorted({size.rows for size in sizes}), sizes[-1].calls
        shape = self._longest, layout.max_rows
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=carried.device)
        self.graphs = StepGraphs([size for size in sizes if size.calls], self._compute, capture)

    def plan(self, starts: Sequence[ChainStart], num_calls: int) -> Chain | None:
        """Return the drafts to draw, of 1 + `num_calls` tokens each, with tensors on the host; None if a request
        needs the host, or there are too many.
        """
        has_rows = next_size(self._counts, len(starts)) is not None
        if has_rows and all(self.fits(start, num_calls) for start in starts):
            return _chain(starts, num_calls, self._layout)
        return None

    def fits(self, start: ChainStart, num_calls: int) -> bool:
        """Whether a request's draft can be drawn on the device, and its context has room for all of it."""
        num_tokens = start.num_left_out + start.position + 1
        last = start.position + start.most_later + num_calls
        return last < self._max_len and fits_chooser(start.request, num_tokens)

    def tokens(
        self,
        chain: Chain,
        logits: torch.Tensor,
        carried: torch.Tensor | None,
        later: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return int64 [1 + calls, R] on the device: the draft tokens of `chain`, whose tensors are there, too; -1
        where no choice is valid, and any token after it.

        logits: float32 [R, V], after the last token of each request; carried: [R, C], what the call with these
        logits carried over; later: int64 [R], by how much the last tokens' positions are later.
        """
        count = chain.num_rows
        self._rows.replace(chain.fields, chain.tables, later)
        self._rows.enter(count)
        first = self._rows.choose(count, logits, self._choose, cuts=True)
        self._rows.advance(count, first)
        if carried is not None:
            self._carried[:count] = carried
        rows = next_size(self._counts, count)
        assert rows is not None
        found, left = [first[None]], chain.num_calls
        while left:
            calls = self._longest if left >= self._longest else 1
            self.graphs.run(ChainSize(rows, calls))
            found.append(self._tokens[:calls, :count].clone())
            left -= calls
        return torch.cat(found)

    @torch.inference_mode()
    def _compute(self, size: ChainSize) -> None:
        count, rows, carried = size.rows, self._rows, self._carried[: size.rows]
        batch = rows.batch(count, self._max_len)
        for index in range(size.calls):
            rows.enter(count)
            logits, carried_over = self._call(rows.token_ids(count), batch, carried)
            carried.copy_(carried_over)
            # Graphs without cuts would save a few short kernels in each call, and take as much memory again.
            tokens = rows.choose(count, logits, self._choose, cuts=True)
            rows.advance(count, tokens)
            self._tokens[index, :count] = tokens


def _chain(starts: Sequence[ChainStart], num_calls: int, layout: RowLayout) -> Chain:
    """Write the words of these rows, in the host's memory."""
    fields = np.zeros(layout.field(TABLE), dtype=np.int32)
    asked = [start.request.sampling for start in starts]
    columns: tuple[tuple[int, list[Any], type[np.generic]], ...] = (
        (SEED, [start.request.seed & (2**64 - 1) for start in starts], np.uint64),
        (INVERSE, [inverse_temperature(params) for params in asked], np.float64),
        (TOP_P, [params.top_p for params in asked], np.float64),
        (MIN_P, [params.min_p for params in asked], np.float64),
        (POSITION, [start.position for start in starts], np.int32),
        (IN_USE, [1] * len(starts), np.int32),
        (NUM_PROMPT, [start.request.num_prompt - start.num_left_out for start in starts], np.int32),
        (TOP_K, [params.top_k for params in asked], np.int32),
    )
    for index, values, dtype in columns:
        words = np.array(values, dtype=dtype).view(np.int32)
        fields[layout.field(index) : layout.field(index) + len(words)] = words
    lasts = [start.position + start.most_later + num_calls for start in starts]
    num_pages = [last // layout.page_size + 1 for last in lasts]
    pages = [
        [*start.pages[:count], *[layout.empty_page] * (count - len(start.pages))]
        for start, count in zip(starts, num_pages, strict=True)
    ]
    tables = block_table(pages, num_pages, layout.null_page)
    return Chain(len(starts), num_calls, torch.from_numpy(fields), torch.from_numpy(tables))


def chain_sizes(max_rows: int, max_drafts: int) -> list[ChainSize]:
    """Return the sizes of graphs for up to `max_rows` requests and `max_drafts` draft tokens of each, ascending in
    both: of one call, and of as many as follow the first draft token. If none does, sizes of no calls, without
    graphs.
    """
    most = min(max_drafts - 1, _MOST_CALLS)
    counts = [size.rows for size in draft_sizes([1], max_rows)]
    return [ChainSize(rows, calls) for calls in sorted({min(1, most), most}) for rows in counts]
