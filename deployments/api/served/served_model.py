"""A model that the API serves, with its engines and its tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cache import SharedPrefixes
from deployments.api.served.text_codec import TextCodec
from deployments.client.protocol import EngineClient, ModelSwitch
from deployments.config.versions import label_of
from engine.grammar.spec import Grammar
from engine.model_config.tasks import Task
from monitoring.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts about a served model for clients."""

    id: str
    """The model's name in requests and responses."""
    created: int
    """Creation time in Unix seconds."""
    max_model_len: int
    """Maximum number of prompt and output tokens together."""
    vocab_size: int
    """Exclusive upper bound of token ids."""
    owned_by: str = "raydix"
    fingerprint: str | None = None
    """`system_fingerprint` of answers: it names the model's files and the server's version."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens with which the model ends an answer."""
    tasks: tuple[Task, ...] = ("generate",)
    """Tasks that the model is served for."""
    hidden_size: int = 0
    """Dimensions of its embeddings."""
    is_encoder: bool = False
    """Whether it only embeds prompts, or scores pairs by a classification head."""
    sampling_defaults: Mapping[str, int | float] = field(default_factory=dict)
    """Default sampling parameters of requests, by name; `max_tokens` is only for chat requests."""


class GrammarChecker(Protocol):
    """Checks whether a model's engines can enforce a grammar."""

    async def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar, with the results of its check, if they can enforce it.

        Raises InvalidGrammar, or Overloaded when too many checks are waiting.
        """


async def nothing_cached() -> dict[str, int]:
    """Empty no caches, because there are no engines that have some."""
    return {}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its engines and its tokenizer, which answer the requests that name it."""

    card: ModelCard
    client: EngineClient
    codec: TextCodec
    metrics: Metrics | None = None
    """Where the model's requests are counted; None counts nothing."""
    switch: ModelSwitch | None = None
    """Loads and unloads the model; None: it is always loaded."""
    grammars: GrammarChecker | None = None
    """Checks the grammars that answers must match; None leaves that to the engines."""

    empty_caches: Callable[[], Awaitable[Mapping[str, int]]] = nothing_cached
    """Has all replicas drop the prefixes that no request uses; returns the pages that each one freed. Raises
    `Unavailable` when one of them does not answer."""

    @property
    def special_ids(self) -> set[int]:
        """Special tokens, but those with which the model ends an answer."""
        return self.codec.special_ids - self.card.eos_token_ids

    shared: SharedPrefixes = field(default_factory=SharedPrefixes)
    """Prefixes that the engines compute at their start, for all tenants."""
    version: str | None = None
    """Its version, where the model has versions."""

    @property
    def name(self) -> str:
        """The name that distinguishes it from all other models and versions."""
        return label_of(self.card.id, self.version)
