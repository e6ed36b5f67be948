"""Measure what rounding to eight bits costs: the embedded model's answers with `quantization: int8` for its
weights or `kv_dtype: fp8` for its KV, and without.

    python -m benchmarks.quantization_accuracy [--sample N] [--json benchmarks/results/quantization_accuracy.json]

Perplexity is that of the docstring sentences that the model was trained on, each after its question. "Likeliest
tokens" is the share of the sentences' places at which this and the unrounded float32 model have the same likeliest
token. "Greedy tokens" is the share of that model's tokens that are equal, up to where an answer first differs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.program.llm import LLM
from engine.settings.config import DType, KVDType, Quantization
from engine.values.sampling_params import SamplingParams
from training.corpus import Fact, load_facts
from training.phrasings import LONG, SHORT

VARIANTS: tuple[tuple[DType, Quantization | None, KVDType], ...] = (
    ("float32", None, "auto"),
    ("float32", "int8", "auto"),
    ("float32", None, "fp8"),
    ("bfloat16", None, "auto"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", None, "fp8"),
)
"""Variants; the first is the reference for the others."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one variant."""

    nll: float
    """Mean negative log-likelihood of an answer's token, in nats."""
    perplexity: float
    likeliest: float
    """Share of the scored tokens at which the likeliest is the reference's, 0 to 1."""
    equal: float
    """Share of the reference's greedy tokens, 0 to 1."""
    tokens: int
    """Number of scored tokens."""


@dataclass(frozen=True)
class Answers:
    """One variant's answers to the questions."""

    likeliest: list[int]
    """Tokens at the scored places."""
    greedy: list[list[int]]
    """Tokens of each answer."""


def questions(sample: int) -> list[tuple[str, Fact]]:
    """Return questions that the model was trained on, with their facts; equal for equal `sample`."""
    rng = random.Random(0)
    return [(rng.choice(SHORT + LONG).format(fact.full), fact) for fact in rng.sample(load_facts(), sample)]


def measure(llm: LLM, sample: int, reference: Answers | None = None) -> tuple[Accuracy, Answers]:
    """Return the accuracy compared with `reference` (None: with its own answers), and the answers."""
    prompts, scored, answer_lengths = [], [], []
    for question, fact in questions(sample):
        text = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        assert isinstance(text, str)
        prompt = llm.tokenizer.encode(text, add_special_tokens=False)
        answer = llm.tokenizer.encode(fact.sentence, add_special_tokens=False)
        prompts.append(prompt)
        scored.append(prompt + answer)
        answer_lengths.append(len(answer))
    scores = llm.generate(scored, SamplingParams(max_tokens=1, prompt_logprobs=1), progress=False)
    tokens = [
        token
        for output, length in zip(scores, answer_lengths, strict=True)
        for token in output.prompt_logprobs[-length:]
        if token is not None
    ]
    greedy = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0), progress=False)
    answers = Answers([token.top[0][0] for token in tokens], [output.token_ids for output in greedy])
    reference = reference or answers
    nll = -sum(token.logprob for token in tokens) / len(tokens)
    likeliest = sum(map(eq, answers.likeliest, reference.likeliest)) / len(tokens)
    equal = _share_equal(reference.greedy, answers.greedy)
    perplexity, num_tokens = round(math.exp(nll), 5), len(tokens)
    return Accuracy(round(nll, 5), perplexity, round(likeliest, 5), round(equal, 5), num_tokens), answers


def _share_equal(reference: list[list[int]], answers: list[list[int]]) -> float:
    same = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, answer, strict=False)))
        for expected, answer in zip(reference, answers, strict=True)
    )
    return same / sum(map(len, reference))


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="questions (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    rows: dict[str, Accuracy] = {}
    reference: Answers | None = None
    for dtype, quantization, kv_dtype in VARIANTS:
        llm = LLM(dtype=dtype, quantization=quantization, kv_dtype=kv_dtype, kv_pages=4096)
        rounded = quantization or ("KV fp8" if kv_dtype == "fp8" else "not rounded")
        rows[f"{dtype}, {rounded}"], answers = measure(llm, args.sample, reference)
        reference = reference or answers
    table = Table(title="Embedded model: weights, or KV, rounded to eight bits")
    for column in ("variant", "NLL", "perplexity", "equal likeliest tokens", "equal greedy tokens"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, row in rows.items():
        shares = f"{row.likeliest:.2%}", f"{row.equal:.2%}"
        table.add_row(name, f"{row.nll:.5f}", f"{row.perplexity:.5f}", *shares)
    Console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: asdict(row) for name, row in rows.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
