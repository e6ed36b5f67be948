"""How Qwen3-Reranker is asked whether a document answers a query: the prompt, and the tokens of its answer.

    system: judge ... user: <Instruct>: I  <Query>: Q  <Document>: D  assistant: <think></think> ▶ yes | no
    ╰──────── begin ───────╯╰────────── the client's texts ─────────╯╰────────── end ─────────╯

The score is the probability of "yes" against "no". The common part of one query's documents is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.api.base.errors import invalid
from deployments.api.served.text_codec import TextCodec

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The default instruction, with which the model was trained."""
_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Judge:
    """The prompts of one model's tokenizer."""

    codec: TextCodec
    begin: Sequence[int]
    end: Sequence[int]
    answers: tuple[int, int]
    """The tokens of "yes" and "no"."""

    @classmethod
    def of(cls, codec: TextCodec, model: str) -> Judge:
        """Make the judge of a model. Raises `ApiError` 400 if its tokenizer lacks the tokens."""
        answers = [codec.single_token(text) for text in ("yes", "no", "<|im_start|>", "<|im_end|>")]
        yes, no = answers[:2]
        if yes is None or no is None or None in answers:
            raise invalid(
                f"The model {model} cannot judge documents: its tokenizer lacks the tokens yes, no, "
                "<|im_start|> and <|im_end|>, which Qwen3-Reranker's prompts need; take rerank out of its "
                "engine.tasks, or name another model.",
                "model",
                "model_not_supported",
            )
        begin, end = (codec.encode(text, add_special_tokens=False) for text in (_BEGIN, _END))
        return cls(codec, begin, end, (yes, no))

    @property
    def num_fixed(self) -> int:
        """Tokens of a prompt besides the client's texts."""
        return len(self.begin) + len(self.end)

    def encode(self, text: str, most: int) -> list[int]:
        """Return the prompt of a pair's `text`. Raises TooManyTokens for far more tokens than `most`."""
        return [*self.begin, *self.codec.encode_plain(text, most), *self.end]


def asked(query: str, document: str, instruction: str | None) -> str:
    """Return a pair's text within the prompt."""
    return f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"


@dataclass(frozen=True, slots=True)
class CutWithin:
    """Shortens a prompt within the client's texts, from the end of the document."""

    num_tokens: int
    num_after: int
    """Tokens behind those texts."""

    def of(self, ids: list[int]) -> list[int]:
        """Return a prompt, shortened."""
        if len(ids) <= self.num_tokens:
            return ids
        return ids[: self.num_tokens - self.num_after] + ids[-self.num_after :]
