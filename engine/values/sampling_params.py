"""Sampling parameters: how a request's tokens are chosen and when it ends. All values are checked here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn

from engine.grammar.spec import Grammar
from engine.values.beam_search import BeamParams
from engine.values.pooling import Pooling

MAX_STOP_STRINGS = 8
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are divided by it, and stay finite as float32: those divided by 1e-38 would not."""
# Fields that are numbers, with their bounds, and fields that are integers, with their least values.
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
)
_COUNTS = (("top_k", 0), ("max_tokens", 1), ("min_tokens", 0))
# Fields without a meaning in beam search, because they choose single tokens or look at text, with neutral values.
_NOT_WITH_BEAMS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "temperature": (0.0, 1.0),
        "top_p": (1.0,),
        "top_k": (0,),
        "min_p": (0.0,),
        "stop": ((),),
        "logprobs": (None,),
        "prompt_logprobs": (None,),
        "grammar": (None,),
    }
)


class InvalidSamplingParams(ValueError):
    """A sampling parameter is out of its range. `param` names it; the message says what was expected."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Raises `InvalidSamplingParams` when a value is out of range."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (greedy). 0 to 100."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least this. (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the most likely one. [0, 1]."""
    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """Fewest tokens to generate: end-of-sequence and stop tokens are not sampled before."""
    stop: tuple[str, ...] = ()
    """Strings that end the text and are cut from it. The detokenizer finds them across token borders."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the request, besides the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence token."""
    seed: int | None = None
    """Sampling noise is a function of (seed, position) only. None: the engine draws a seed."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a generated token's logit once per occurrence. [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019).
    [0.01, 100]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a value added to its logit. [-100, 100]."""
    logprobs: int | None = None
    """Report the log-probability of each chosen token and of this many alternatives; None reports none."""
    prompt_logprobs: int | None = None
    """Report the log-probability and rank of each prompt token but the first, and this many alternatives to it;
    None reports none. The prompt is computed even if its KV is cached, because its logits are needed."""
    grammar: Grammar | None = None
    """Grammar that the output must match; None allows any output."""
    beams: BeamParams | None = None
    """Search for the likeliest outputs instead of sampling. Penalties, bias and `min_tokens` change the
    log-probabilities that are searched; parameters that choose or report single tokens are rejected."""
    pooling: Pooling | None = None
    """End with the prompt and report this of it instead of tokens; parameters that choose tokens then have no
    effect."""

    def __post_init__(self) -> None:
        # Every request is checked here, in its ingress and in its engine, so messages are built only when needed.
        self._check_ranges()
        self._check_stops()
        if self.ignore_eos and self.grammar is not None:
            _refuse(
                "ignore_eos", "must be false if the output has to match a grammar, which determines where it ends"
            )
        if self.logit_bias:
            self._check_bias()
        if self.beams is not None:
            self._check_beams(self.beams)
        if self.pooling is not None:
            for name in ("beams", "grammar", "prompt_logprobs"):
                if getattr(self, name) is not None:
                    _refuse(name, "cannot be combined with pooling, which generates nothing; leave it out")

    def _check_ranges(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not _in(value, low, high):
                _refuse(name, f"must be in [{low:g}, {high:g}], got {value!r}")
        if not (_in(self.top_p, 0, 1) and self.top_p > 0):
            _refuse("top_p", f"must be in (0, 1], got {self.top_p!r}")
        for name, least in _COUNTS:
            count = getattr(self, name)
            if not (_is_int(count) and least <= count <= MAX_COUNT):
                _refuse(name, f"must be an integer in [{least}, {MAX_COUNT}], got {count!r}")
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.seed is not None and not (_is_int(self.seed) and -MAX_SEED <= self.seed <= MAX_SEED):
            _refuse("seed", f"must be a 64-bit integer, got {self.seed!r}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not (_is_int(count) and 0 <= count <= MAX_LOGPROBS):
                _refuse(name, f"must be an integer in [0, {MAX_LOGPROBS}], got {count!r}")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not (isinstance(text, str) and 0 < len(text) <= MAX_STOP_STRING_CHARS):
                _refuse("stop", f"must hold strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            count = len(self.stop_token_ids)
            _refuse("stop_token_ids", f"has {count} ids, at most {MAX_STOP_TOKEN_IDS} are allowed")
        for token in self.stop_token_ids:
            if not (_is_int(token) and token >= 0):
                _refuse("stop_token_ids", f"must hold token ids, got {token!r}")

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            if not (_is_int(token) and token >= 0):
                _refuse("logit_bias", f"has the key {token!r}; keys are token ids")
            if not _in(bias, -100, 100):
                _refuse("logit_bias", f"must hold values in [-100, 100], got {bias!r}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed")

    def _check_beams(self, beams: BeamParams) -> None:
        for name, count, most in (
            ("beam width", beams.width, MAX_BEAM_WIDTH),
            ("n", beams.num_returned, beams.width),
        ):
            if not (_is_int(count) and 1 <= count <= most):
                _refuse(name, f"must be an integer in [1, {most}], got {count!r}")
        if not _in(beams.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY):
            bounds = f"[{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
            _refuse("length_penalty", f"must be in {bounds}, got {beams.length_penalty!r}")
        if not (isinstance(beams.early_stopping, bool) or beams.early_stopping == "never"):
            _refuse("early_stopping", f'must be true, false or "never", got {beams.early_stopping!r}')
        for name, neutral in _NOT_WITH_BEAMS.items():
            if getattr(self, name) not in neutral:
                shown = repr(getattr(self, name))
                _refuse(name, f"cannot be combined with beam search, got {shown}; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _refuse(param: str, expectation: str) -> NoReturn:
    raise InvalidSamplingParams(param, f"{param} {expectation}")


def _is_int(value: object) -> bool:
    return type(value) is int or (isinstance(value, int) and not isinstance(value, bool))


def _in(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite number in [low, high]; NaN is in no range."""
    if type(value) is float:  # The usual case; infinity and NaN fail the comparison.
        return low <= value <= high
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # A union would be slower.
        return False
    return math.isfinite(value) and low <= value <= high
