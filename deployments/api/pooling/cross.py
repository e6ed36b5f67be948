"""How a cross-encoder (bge-reranker-v2-m3) reads a query and a document: as one prompt, with marks between them.

    <s> query </s> </s> document </s> ▶ score
    ╰b╯       ╰between╯          ╰e╯           the tokenizer's own marks

The score is the sigmoid of the classification head's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.api.served.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class CrossPrompt:
    """The prompts of one query."""

    codec: TextCodec
    head: Sequence[int]
    """All before the document."""
    end: Sequence[int]

    @classmethod
    def of(cls, codec: TextCodec, query: str, most: int) -> CrossPrompt:
        """Begin the prompts of a query. Raises TooManyTokens if it has far more tokens than `most`."""
        begin, between, end = codec.pair_marks
        return cls(codec, (*begin, *codec.encode_plain(query, most), *between), end)

    @property
    def num_fixed(self) -> int:
        """Tokens of a prompt besides the document's."""
        return len(self.head) + len(self.end)

    def encode(self, document: str, most: int) -> list[int]:
        """Return the prompt of a document, in which no text of the document becomes a mark. Raises
        TooManyTokens."""
        return [*self.head, *self.codec.encode_plain(document, most), *self.end]
