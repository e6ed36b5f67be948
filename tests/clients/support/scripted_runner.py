"""A runner that replays token ids: what a script says, tokenized, whatever a model would compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from engine.grammar.constraint import Constraint
from engine.host_tier.host_pool import HostMemory
from engine.host_tier.lower_tier import NoLowerTier
from engine.model_config.config import ModelConfig
from engine.model_files.model_directory import fingerprint
from engine.program.engine import Engine, model_directory
from engine.settings.config import EngineConfig
from engine.text.tokenizer import load_tokenizer
from engine.values.logprobs import TokenLogprobs
from engine.values.plan import Chunk, Step, StepPlan, StepResult
from engine.values.request import Request
from tests.clients.support.scripts import answer

_LOGPROB = -0.125


class ScriptedRunner:
    """Samples the tokens of the script that a prompt asks for, and then the model's end.

    Where an answer must match a grammar and the script does not, the answer says so.
    """

    attention_name = device = dtype = "none"
    host_memory = HostMemory()
    lower_tier = NoLowerTier()
    num_state_slots = 0
    is_encoder = False
    layer_groups = None
    page_memory = None

    def __init__(self, config: EngineConfig) -> None:
        directory = model_directory(config)
        self.model_config = ModelConfig.from_directory(directory)
        self.num_pages = config.kv_pages or 4096
        self.fingerprint = fingerprint(directory)
        self._tokenizer = load_tokenizer(directory)
        self._end = min(self.model_config.eos_token_ids)
        self._reply = lru_cache(maxsize=256)(self._scripted)

    def prepare(self, plan: StepPlan) -> Step:
        """Look up the tokens; there is nothing to compute."""
        tokens = [self._next(chunk) for chunk in plan.sampling_chunks]
        logprobs = [
            _logprobs(token, chunk.request) for token, chunk in zip(tokens, plan.sampling_chunks, strict=True)
        ]
        return lambda: StepResult(tokens, logprobs)

    def _next(self, chunk: Chunk) -> int:
        ids = self._reply(tuple(chunk.request.prompt_ids))
        constraint = chunk.request.constraint
        if constraint is not None and not _allows(constraint, ids):
            ids = self._encode("The grammar does not allow what the script says.")
        place = chunk.start + chunk.num_tokens - chunk.request.num_prompt
        return ids[place] if place < len(ids) else self._end

    def _scripted(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        return self._encode(answer(self._tokenizer.decode(list(prompt_ids), skip_special_tokens=False)))

    def _encode(self, text: str) -> tuple[int, ...]:
        return (*self._tokenizer.encode(text, add_special_tokens=False), self._end)


def _allows(constraint: Constraint, ids: Sequence[int]) -> bool:
    """Whether a grammar allows an answer and its end, however much of it the constraint has followed."""
    *text, end = ids
    matcher = constraint._compiled.matcher.deep_copy()
    is_allowed = matcher.try_consume_tokens(text) == len(text)
    return is_allowed and bool(matcher.compute_bitmask()[end // 8] >> end % 8 & 1)


def _logprobs(token: int, request: Request) -> TokenLogprobs | None:
    count = request.sampling.logprobs
    return None if count is None else TokenLogprobs(token, _LOGPROB, ((token, _LOGPROB),)[:count])


def engines(config: EngineConfig) -> Engine:
    """Make an engine that replays scripts."""
    return Engine(config, ScriptedRunner(config))
