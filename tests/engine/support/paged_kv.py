"""Ragged batches over scattered pages, and attention over them written out as a mask and a softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

import torch

from cache import Namespace
from engine.attention.base import AttentionBackend, AttentionShape, AttentionStep, StepWithSums
from engine.attention.batch import AttentionBatch
from engine.attention.kv_pages import KVPages, store_kv
from engine.attention.pinned import to_device
from engine.values.plan import Chunk
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

CPU = torch.device("cpu")


def chunk(start: int, num_tokens: int, pages: list[int]) -> Chunk:
    sampling = SamplingParams()
    request = Request.make("r", [0], sampling, arrival=0.0, seed=0, namespace=Namespace("m"))
    return Chunk(request, start, num_tokens, [0] * num_tokens, pages, samples=True)


@dataclass(frozen=True)
class Heads:
    """Number and size of the heads of an attention layer."""

    group: int
    """Queries a KV head."""
    num_kv_heads: int
    dim: int
    latent: int | None = None
    """Numbers of a key that are its value; None: values lie apart."""

    @property
    def num(self) -> int:
        return self.group * self.num_kv_heads


class Paged:
    """Rows of (positions before, tokens of the step), with random queries, keys and values.

    Pages are in a random order. What no query sees is NaN: before the window, after a row's end, in other pages.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, int]],
        heads: Heads,
        page_size: int,
        window: int | None,
        dtype: torch.dtype,
        seed: int = 0,
        soft_cap: float | None = None,
        has_sinks: bool = False,
        device: torch.device = CPU,
        needs_sums: bool = False,
        is_causal: bool = True,
    ) -> None:
        """`is_causal`: whether a row's queries are its last positions; otherwise they see all."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

        self.window, self.device, self.is_causal = window, device, is_causal
        self.shape = AttentionShape(
            heads.num, heads.num_kv_heads, heads.dim, page_size, frozenset({window}),
            soft_cap=soft_cap, has_sinks=has_sinks, latent=heads.latent, needs_sums=needs_sums,
        )  # fmt: skip
        self.sinks = 3 * random(heads.num) if has_sinks else None
        parts = 2 if heads.latent is None else 1
        self.held = [random(parts, start + n, heads.num_kv_heads, heads.dim) for start, n in rows]
        self.queries = [random(n, heads.num, heads.dim) for _, n in rows]
        self.fill(generator)

    def alone(self, row: int) -> Paged:
        """Return a case with one of the rows."""
        return self._with(self.held[row : row + 1], self.queries[row : row + 1])

    def after(self, start: int) -> Paged:
        """The case's only row, as if the positions before `start` were computed already."""
        (held,), (query,) = self.held, self.queries
        return self._with([held], [query[start - held.shape[1] :]])

    def _with(self, held: list[torch.Tensor], queries: list[torch.Tensor]) -> Paged:
        other = copy(self)
        other.held, other.queries = held, queries
        other.fill(torch.Generator().manual_seed(0))
        return other

    def fill(self, generator: torch.Generator) -> None:
        """Pages that hold what comes before the step."""
        size, (parts, longest, kv_heads, dim) = self.shape.page_size, max(held.shape for held in self.held)
        per_row = -(-longest // size)
        order = torch.randperm(per_row * len(self.held), generator=generator).tolist()
        self.pages = KVPages(1, len(order), size, kv_heads, dim, self.held[0].dtype, self.device, parts)
        self.pages.layer(0)[:, : self.pages.num_pages] = torch.nan
        slots = self.pages.layer(0).flatten(1, 2)
        chunks = []
        for index, (start, held, query) in enumerate(self._rows()):
            row = chunk(start, len(query), order[index * per_row : (index + 1) * per_row])
            seen = range(0 if self.window is None else max(0, start - self.window + 1), start)
            slots[:, [row.pages[p // size] * size + p % size for p in seen]] = held[:, seen.start : start]
            chunks.append(row)
        batch = AttentionBatch.from_chunks(chunks, size, self.pages.null_page)
        self.batch = to_device(replace(batch, is_causal=self.is_causal), self.device)

    def _rows(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each row's first position of the step, its keys and values, and its queries."""
        for held, query in zip(self.held, self.queries, strict=True):
            yield held.shape[1] - len(query), held, query

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Return the output of `backend`, [N, num_heads * value_dim]."""
        return self._prepared(backend).attend(self.pages.layer(0), self.query(), self.window, sinks=self.sinks)

    def attend_with_sums(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of `backend`, [N, num_heads, value_dim], and the logarithms of its sums of weights."""
        step = cast("StepWithSums", self._prepared(backend))
        return step.attend_with_sums(self.pages.layer(0), self.query())

    def _prepared(self, backend: AttentionBackend) -> AttentionStep:
        key, *value = self.new()
        store_kv(self.pages.layer(0), self.batch.slot_mapping, key, value[0] if value else None)
        return backend.prepare(self.batch, self.pages.null_page)

    def new(self) -> torch.Tensor:
        """The step's keys and values, [2, N, num_kv_heads, head_dim]; [1, ...] where keys hold the values."""
        return torch.cat([held[:, start:] for start, held, _ in self._rows()], dim=1)

    def query(self) -> torch.Tensor:
        """The step's queries, [N, num_heads, head_dim]."""
        return torch.cat(self.queries)

    def expected(self) -> torch.Tensor:
        """Return the expected output, computed in float64."""
        return torch.cat([row for row, _ in self._expected()]).flatten(1)

    def expected_sums(self) -> torch.Tensor:
        """Return the logarithms of the sums of weights, float64 [N, num_heads]."""
        return torch.cat([sums for _, sums in self._expected()])

    def _expected(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start, held, query in self._rows():
            yield self._row(start, held.double(), query.double())

    def _row(self, start: int, held: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = held.repeat_interleave(query.shape[1] // held.shape[2], 2).transpose(1, 2)
        keys, values = parts[0], parts[-1][..., : self.shape.value_dim]
        positions = torch.arange(held.shape[1], device=held.device)
        queries = positions[start:, None]
        seen = (positions <= queries) & (positions > queries - (self.window or held.shape[1]))
        if not self.is_causal:
            seen = torch.ones_like(seen)
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * self.shape.scale
        if self.shape.soft_cap is not None:
            scores = self.shape.soft_cap * torch.tanh(scores / self.shape.soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), -1)
        attended = scores.softmax(-1)[..., : held.shape[1]] @ values
        return attended.transpose(0, 1), scores.logsumexp(-1).T
