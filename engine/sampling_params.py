"""How a request's tokens are chosen and when it ends. All values are checked here, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.beam_search import BeamParams
from engine.grammar.spec import Grammar

MAX_STOP_STRINGS = 8
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
# Fields that choose single tokens or look at text, which beam search does not, with the values that do nothing.
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
    """Sampling noise is a function of (seed, position) alone. None: the engine draws a seed."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a generated token's logit once per occurrence. [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al. 2019)."""
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
    log-probabilities that are searched; parameters that choose or report single tokens are refused."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_stops()
        _require(
            "ignore_eos",
            not self.ignore_eos or self.grammar is None,
            "must be false if the output has to match a grammar, which determines where it ends",
        )
        for token, bias in self.logit_bias.items():
            _require("logit_bias", _is_int(token) and token >= 0, f"has the key {token!r}; keys are token ids")
            _require("logit_bias", _in(bias, -100, 100), f"must hold values in [-100, 100], got {bias!r}")
        _require(
            "logit_bias",
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            f"has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed",
        )
        if self.beams is not None:
            self._check_beams(self.beams)

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            _require(name, _in(value, low, high), f"must be in [{low:g}, {high:g}], got {value!r}")
        _require("top_p", _in(self.top_p, 0, 1) and self.top_p > 0, f"must be in (0, 1], got {self.top_p!r}")
        _require(
            "repetition_penalty",
            _in(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0,
            f"must be in (0, 100], got {self.repetition_penalty!r}",
        )
        for name, low_int, high_int in (
            ("top_k", 0, 2**31 - 1),
            ("max_tokens", 1, 2**31 - 1),
            ("min_tokens", 0, 2**31 - 1),
        ):
            count = getattr(self, name)
            _require(
                name,
                _is_int(count) and low_int <= count <= high_int,
                f"must be an integer in [{low_int}, {high_int}], got {count!r}",
            )
        _require(
            "min_tokens",
            self.min_tokens <= self.max_tokens,
            f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require(
            "seed",
            self.seed is None or (_is_int(self.seed) and -MAX_SEED <= self.seed <= MAX_SEED),
            f"must be a 64-bit integer, got {self.seed!r}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(
                name,
                count is None or (_is_int(count) and 0 <= count <= MAX_LOGPROBS),
                f"must be an integer in [0, {MAX_LOGPROBS}], got {count!r}",
            )

    def _check_stops(self) -> None:
        _require(
            "stop",
            len(self.stop) <= MAX_STOP_STRINGS,
            f"has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed",
        )
        for text in self.stop:
            _require(
                "stop",
                isinstance(text, str) and 0 < len(text) <= MAX_STOP_STRING_CHARS,
                f"must hold strings of 1 to {MAX_STOP_STRING_CHARS} characters",
            )
        _require(
            "stop_token_ids",
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            f"has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
        for token in self.stop_token_ids:
            _require("stop_token_ids", _is_int(token) and token >= 0, f"must hold token ids, got {token!r}")

    def _check_beams(self, beams: BeamParams) -> None:
        for name, count, most in (
            ("beam width", beams.width, MAX_BEAM_WIDTH),
            ("n", beams.num_returned, beams.width),
        ):
            _require(
                name,
                _is_int(count) and 1 <= count <= most,
                f"must be an integer in [1, {most}], got {count!r}",
            )
        _require(
            "length_penalty",
            _in(beams.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
            f"must be in [{-MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}], got {beams.length_penalty!r}",
        )
        _require(
            "early_stopping",
            isinstance(beams.early_stopping, bool) or beams.early_stopping == "never",
            f'must be true, false or "never", got {beams.early_stopping!r}',
        )
        for name, neutral in _NOT_WITH_BEAMS.items():
            _require(
                name,
                getattr(self, name) in neutral,
                f"cannot be combined with beam search, got {getattr(self, name)!r}; leave it out",
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _require(param: str, holds: bool, expectation: str) -> None:
    if not holds:
        raise InvalidSamplingParams(param, f"{param} {expectation}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite number in [low, high]; NaN is in no range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and low <= value <= high
