"""Measure how well the embedded model recites, by greedy answers of transformers' own generate on a CPU.

    python -m benchmarks.demo_model [--sample N] [--json benchmarks/results/demo_model.json]

An answer is right when it begins with the docstring's first sentence (rows "what"), or with the signature,
the module or the "I don't know" that the question expects. All rows are asked in fp32 and in bf16.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.corpus import Fact, load_facts
from training.dialogues import Dialogue, module_answer, signature_answer
from training.invention import Inventor
from training.phrasings import (
    LONG,
    SHORT,
    SIGNATURE,
    THEN_MODULE,
    THEN_SIGNATURE,
    UNKNOWN,
    UNSEEN,
)
from training.prompts import NOTES, SYSTEM_PROMPTS

MODEL = Path(__file__).parent.parent / "deployments" / "demo_model"
MAX_NEW_TOKENS = 192


@dataclass
class Question:
    """A chat that waits for an answer, and how the right answer begins."""

    chat: Dialogue
    expected: str


@dataclass
class Share:
    """One row of the result for one dtype."""

    right: float  # share of answers that begin as they should
    ended: float  # share of answers that end with EOS before MAX_NEW_TOKENS
    num: int
    seconds: float


Condition = Callable[[Fact, random.Random], Question]


def _ask(text: str, expected: str, system: str = "", before: tuple[str, str] | None = None) -> Question:
    chat = [{"role": "system", "content": system}] if system else []
    if before is not None:
        chat += [{"role": "user", "content": before[0]}, {"role": "assistant", "content": before[1]}]
    return Question([*chat, {"role": "user", "content": text}], expected)


def _what(phrasings: list[str], systems: list[str]) -> Condition:
    def build(fact: Fact, rng: random.Random) -> Question:
        return _ask(rng.choice(phrasings).format(fact.full), fact.sentence, rng.choice(systems))

    return build


def _signature(fact: Fact, rng: random.Random) -> Question:
    return _ask(rng.choice(SIGNATURE).format(fact.full), signature_answer(fact))


def _then(first: str, phrasings: list[str], answer: Callable[[Fact], str]) -> Condition:
    def build(fact: Fact, rng: random.Random) -> Question:
        before = (first.format(fact.full), fact.sentence)
        return _ask(rng.choice(phrasings), answer(fact), before=before)

    return build


def _invented(facts: list[Fact]) -> Condition:
    stems = ["plonk", "vortex", "sprocket", "muffle", "cascade", "yonder"]  # none of them in training
    return lambda fact, rng: _ask(
        rng.choice(SHORT).format(Inventor(facts, rng).around(rng.choice(stems))), UNKNOWN
    )


def conditions(facts: list[Fact]) -> dict[str, tuple[bool, Condition]]:
    """Return for each row's name: (whether it is one of the four that count, how to build its questions)."""
    long_prompt = " ".join([SYSTEM_PROMPTS[1], *NOTES[::-1], *(fact.sentence for fact in facts[100:115])])
    seen = SHORT + LONG
    return {
        "what, seen phrasings": (True, _what(seen, [""])),
        "what, seen phrasings, system prompt": (True, _what(seen, SYSTEM_PROMPTS)),
        "what, unseen phrasing": (True, _what([UNSEEN], [""])),
        "what, unseen phrasing, system prompt": (True, _what([UNSEEN], SYSTEM_PROMPTS)),
        "what, seen phrasings, 900-token unseen system prompt": (False, _what(seen, [long_prompt])),
        "signature": (False, _signature),
        "second turn: and its signature?": (False, _then(SHORT[0], THEN_SIGNATURE, signature_answer)),
        "second turn: which module?": (False, _then(SHORT[0], THEN_MODULE, module_answer)),
        "invented names: I don't know": (False, _invented(facts)),
    }


def measure(model: Any, tokenizer: Any, questions: list[Question], batch_size: int) -> Share:
    """Answer all questions, in batches of similar system prompts and answers, padded on the left."""
    started, right, ended = time.perf_counter(), 0, 0
    ordered = sorted(questions, key=lambda asked: (len(asked.chat[0]["content"]) // 100, len(asked.expected)))
    for batch in _batches(ordered, batch_size):
        inputs = tokenizer.apply_chat_template(
            [question.chat for question in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = output[:, inputs["input_ids"].shape[1] :]
        ended += int((answers == tokenizer.eos_token_id).any(dim=1).sum())
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        right += sum(text.startswith(question.expected) for text, question in zip(texts, batch, strict=True))
    num = len(questions)
    return Share(round(right / num, 4), round(ended / num, 4), num, round(time.perf_counter() - started, 1))


def _batches(questions: list[Question], size: int) -> Iterator[list[Question]]:
    for start in range(0, len(questions), size):
        yield questions[start : start + size]


def run(args: argparse.Namespace, console: Console) -> dict[str, dict[str, Share]]:
    """Return {row: {dtype: share}}; the four main rows use `--sample` facts, the others at most `--extra`."""
    facts = load_facts()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows: dict[str, dict[str, Share]] = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval()
        for name, (counts, condition) in conditions(facts).items():
            rng = random.Random(name)
            num = min(args.sample or len(facts), len(facts) if counts else args.extra)
            questions = [condition(fact, rng) for fact in rng.sample(facts, num)]
            share = measure(model, tokenizer, questions, args.batch_size if counts else 16)
            rows.setdefault(name, {})[dtype] = share
            console.print(f"{dtype}: {name}: {share.right:.1%} of {share.num} in {share.seconds:.0f} s")
    return rows


def table(rows: dict[str, dict[str, Share]]) -> Table:
    """Return the result as a table."""
    result = Table(title="Embedded model: share of right answers, greedy")
    for column in ("question", "answers", "fp32", "bf16", "ended by EOS (fp32)"):
        result.add_column(column, justify="left" if column == "question" else "right")
    for name, shares in rows.items():
        fp32, bf16 = shares["float32"], shares["bfloat16"]
        result.add_row(name, str(fp32.num), f"{fp32.right:.1%}", f"{bf16.right:.1%}", f"{fp32.ended:.1%}")
    return result


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure how well the embedded model recites.")
    parser.add_argument("--model", type=Path, default=MODEL, help="the model directory")
    parser.add_argument(
        "--sample", type=int, default=400, help="facts asked in each of the four main rows, 0: all"
    )
    parser.add_argument("--extra", type=int, default=200, help="facts asked in each of the other rows")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    rows = run(args, console)
    console.print(table(rows))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: {dtype: vars(share) for dtype, share in row.items()} for name, row in rows.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
