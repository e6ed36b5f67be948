"""What rounding weights to eight bits costs: the embedded model's answers, with `quantization: int8` and without.

    python -m benchmarks.int8_accuracy [--sample N] [--json benchmarks/results/int8_accuracy.json]

Perplexity: of the docstring sentences that it was trained on, each after its question. Greedy tokens: the share of
the unrounded float32 model's that come out the same, up to where an answer first differs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.demo_model.corpus import Fact, load_facts
from deployments.demo_model.phrasings import LONG, SHORT
from engine.config import DType, Quantization
from engine.llm import LLM
from engine.sampling_params import SamplingParams

VARIANTS: tuple[tuple[DType, Quantization | None], ...] = (
    ("float32", None),
    ("float32", "int8"),
    ("bfloat16", None),
    ("bfloat16", "int8"),
)
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Accuracy:
    """Of one variant."""

    nll: float
    """Mean negative log-likelihood of an answer's token, in nats."""
    perplexity: float
    equal: float
    """Share of the reference's greedy tokens, 0 to 1."""
    tokens: int
    """That were scored."""


def questions(sample: int) -> list[tuple[str, Fact]]:
    """Questions the model was trained on, and what they are about; the same ones for the same `sample`."""
    rng = random.Random(0)
    return [(rng.choice(SHORT + LONG).format(fact.full), fact) for fact in rng.sample(load_facts(), sample)]


def measure(llm: LLM, sample: int, reference: list[list[int]] | None = None) -> tuple[Accuracy, list[list[int]]]:
    """Accuracy beside the greedy answers `reference` (None: beside its own), and the greedy answers."""
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
    scores = llm.generate(scored, SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    losses = [
        -token.logprob
        for output, length in zip(scores, answer_lengths, strict=True)
        for token in output.prompt_logprobs[-length:]
        if token is not None
    ]
    answers = [
        output.token_ids
        for output in llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0), progress=False)
    ]
    nll = sum(losses) / len(losses)
    equal = _share_equal(reference or answers, answers)
    return Accuracy(round(nll, 5), round(math.exp(nll), 5), round(equal, 5), len(losses)), answers


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
    reference: list[list[int]] | None = None
    for dtype, quantization in VARIANTS:
        llm = LLM(dtype=dtype, quantization=quantization, kv_pages=4096, attention="native")
        rows[f"{dtype}, {quantization or 'not rounded'}"], answers = measure(llm, args.sample, reference)
        reference = reference or answers
    table = Table(title="Embedded model: weights rounded to eight bits")
    for column in ("weights", "NLL", "perplexity", "equal greedy tokens"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row.nll:.5f}", f"{row.perplexity:.5f}", f"{row.equal:.2%}")
    Console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: asdict(row) for name, row in rows.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
