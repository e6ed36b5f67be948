"""The rows of logits of a step that may be launched before the tokens of the previous step are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.sampling.token_counts import is_penalized
from engine.values.plan import Chunk
from engine.values.request import PENDING, Request
from engine.values.sampling_row import SamplingRow

_UNREAD = (PENDING,)


def rows_of_step(
    chunks: Sequence[Chunk], sources: Sequence[int | None], known: Callable[[], Sequence[int]]
) -> list[SamplingRow]:
    """Return the rows for which tokens are sampled: one for each chunk, and one for each of its draft tokens.

    sources: for each chunk, the row of the previous step that sampled its last token; None if that is known.
    `known` waits for the previous step's tokens and returns them. It is called only if a row depends on such a
    token, and not only on how many tokens there are.
    """
    pairs = list(zip(chunks, sources, strict=True))
    sampled: Sequence[int] | None = None
    if any(source is not None and _reads_tokens(chunk.request) for chunk, source in pairs):
        sampled = known()
    rows = []
    for chunk, source in pairs:
        num_drafts = chunk.num_drafts
        end = chunk.start + chunk.num_tokens - num_drafts
        if source is None:
            rows.append(SamplingRow(chunk.request, end))
        else:
            tail = _UNREAD if sampled is None else sampled[source : source + 1]
            rows.append(SamplingRow(chunk.request, end - 1, tail))
        if num_drafts:
            drafts = chunk.token_ids[-num_drafts:]
            rows += [SamplingRow(chunk.request, end, drafts[: index + 1]) for index in range(num_drafts)]
    return rows


def _reads_tokens(request: Request) -> bool:
    """Whether the sampler reads the request's earlier tokens."""
    return request.constraint is not None or is_penalized(request.sampling)
