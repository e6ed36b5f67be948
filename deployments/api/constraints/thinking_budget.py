"""`thinking_token_budget`: after so many tokens of reasoning, the mark that ends it is the only token allowed.

    start:  thought{0,N} </think> GAP answer        a thought is any token but the mark and the ends of texts

The grammar counts tokens, so it needs a mark that is one token: special or not, as Qwen's and DeepSeek's are.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from deployments.api.base.errors import invalid
from deployments.api.base.field_checks import in_range
from deployments.api.dialects.reasoning import Thoughts
from deployments.api.fields.protocol import ChatRequest
from deployments.api.served.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens of reasoning an answer may have, and the tokens that it is about."""

    num_tokens: int
    marks: Thoughts
    open_id: int | None
    """The mark that begins reasoning; None if it is several tokens."""
    close_id: int
    eos_ids: Collection[int]
    vocab_size: int

    @property
    def thoughts(self) -> str:
        """The rule for reasoning up to its end, in Lark's syntax."""
        before = f"thought{{0,{self.num_tokens}}} " if self.num_tokens else ""
        return f"{before}<[{self.close_id}]>"

    @property
    def rules(self) -> str:
        """The rule for one token of reasoning."""
        return f"thought: {self._all_but(self.close_id)}"

    @property
    def opened(self) -> str:
        """The mark that begins reasoning, and the text that follows it."""
        label = f" {json.dumps(self.marks.label)}" if self.marks.label else ""
        return (f'"{self.marks.opens}"' if self.open_id is None else f"<[{self.open_id}]>") + label

    @property
    def anything(self) -> str:
        """The rule for an answer of any form, which does not think again."""
        return f"{self._all_but(self.open_id)}*"

    def _all_but(self, excluded: int | None) -> str:
        """Return all tokens but one and those that end texts."""
        gaps = sorted({*self.eos_ids, *([] if excluded is None else [excluded])})
        ranges, begin = [], 0
        for token in [*gaps, self.vocab_size]:
            if begin < token:
                ranges.append(f"{begin}-{token - 1}")
            begin = token + 1
        return f"<[{','.join(ranges)}]>"


def thinking_budget(served: ServedModel, request: ChatRequest) -> ThinkingBudget | None:
    """Return the requested budget; None without one, or if the model does not think. Raises `ApiError` 400."""
    asked, codec, card = request.thinking_token_budget, served.codec, served.card
    if asked is None or asked == -1:
        return None
    in_range("thinking_token_budget", asked, 0, card.max_model_len)
    marks = codec.dialect.thoughts
    if marks is None:
        return None
    close_id = codec.single_token(marks.closes)
    if close_id is None:
        raise invalid(
            f"thinking_token_budget is not supported for this model, whose {marks.closes} is several tokens; "
            "leave it out.",
            "thinking_token_budget",
            "unsupported_field",
        )
    for name, is_asked in (("ignore_eos", request.ignore_eos), ("use_beam_search", request.use_beam_search)):
        if is_asked:
            raise invalid(f"thinking_token_budget cannot be combined with {name}; leave one of them out.", name)
    return ThinkingBudget(
        asked, marks, codec.single_token(marks.opens), close_id, card.eos_token_ids, card.vocab_size
    )
