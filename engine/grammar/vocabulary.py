"""A model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidGrammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary that grammars are compiled against: plain values that can be sent to another process."""

    tokenizer_json: str
    """The tokenizer as the `tokenizers` library writes it, tokens added by its configuration included."""
    num_logits: int
    """Number of tokens the model has logits for: more than the tokenizer has if the model's table is padded."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text; one of them ends an output once the grammar allows it."""

    @classmethod
    def of(cls, tokenizer: Any, num_logits: int, eos_token_ids: Iterable[int]) -> Vocabulary:
        """Read a `transformers` tokenizer. Raises InvalidGrammar when it cannot be used with grammars."""
        ends = tuple(sorted(eos_token_ids))
        if not ends:
            raise InvalidGrammar("this model has no end-of-text token, so no grammar could end its output")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidGrammar("this model's tokenizer has no tokenizer.json, which grammars need")
        return cls(backend.to_str(), num_logits, ends)

    def load(self) -> LLTokenizer:
        """Build llguidance's tokenizer: about a second for 100,000 tokens. Raises InvalidGrammar."""
        from llguidance import LLTokenizer

        try:
            own = LLTokenizer(self.tokenizer_json, eos_token=list(self.eos_token_ids))
            if own.vocab_size >= self.num_logits:
                return own
            return LLTokenizer(self.tokenizer_json, n_vocab=self.num_logits, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            raise InvalidGrammar(f"this model's tokenizer cannot be used with grammars: {error}") from error
