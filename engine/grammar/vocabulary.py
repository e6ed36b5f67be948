"""A model's vocabulary, in the forms that llguidance and xgrammar need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine.base.errors import InvalidGrammar
from engine.grammar.xgrammar_matcher import XGrammarCompiler

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary that grammars are compiled against: plain values that can be sent to another process."""

    tokenizer_json: str
    """The tokenizer as the `tokenizers` library writes it, including tokens added by its configuration."""
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

    def load(self) -> LoadedVocabulary:
        """Build llguidance's tokenizer: about a second for 100,000 tokens. Raises InvalidGrammar."""
        from llguidance import LLTokenizer

        try:
            own = LLTokenizer(self.tokenizer_json, eos_token=list(self.eos_token_ids))
            if own.vocab_size < self.num_logits:
                own = LLTokenizer(self.tokenizer_json, n_vocab=self.num_logits, eos_token=list(self.eos_token_ids))
        except ValueError as error:
            raise InvalidGrammar(f"this model's tokenizer cannot be used with grammars: {error}") from error
        return LoadedVocabulary(own)


class LoadedVocabulary:
    """A vocabulary that grammars can be compiled for."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def xgrammar(self) -> XGrammarCompiler:
        """The same for xgrammar, made when it is first needed, which may take seconds."""
        return XGrammarCompiler(self.tokenizer)
