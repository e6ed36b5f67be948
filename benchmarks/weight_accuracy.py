"""Measure what weights of fewer bits cost in accuracy: the embedded model's answers with them and without.

    python -m benchmarks.weight_accuracy [--sample N] [--json benchmarks/results/weight_accuracy.json]

`int8` and `fp8` are values of the engine's setting. `int4` and `fp8, blocks` are checkpoints, made here by plain
rounding: four bits with a scale and a zero point for 32 or 128 inputs (packed as AWQ does), and fp8 with a scale
for blocks of 128 x 128 weights. Quantizers that look at data lose less than plain rounding.

Loss is that of the docstring sentences that the model was trained on. "Likeliest tokens" is the share of their
places where the most likely token is the same. "Greedy tokens" is the share of the unrounded float32 model's
tokens that are equal, up to where an answer first differs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from engine.model_files.model_directory import demo_model_path
from engine.program.llm import LLM
from engine.values.sampling_params import SamplingParams
from training.corpus import Fact, load_facts
from training.phrasings import LONG, SHORT

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each of eight outputs in an int32, in units of four bits."""
Tensors = dict[str, torch.Tensor]


class Variant(NamedTuple):
    name: str
    settings: dict[str, Any]
    store: Callable[[str, torch.Tensor], Tensors] | None = None
    """Function that returns the checkpoint's tensors for a matrix."""
    config: dict[str, Any] | None = None
    """Entry of config.json about the quantization."""


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one variant."""

    nll: float
    """Mean negative log-likelihood of an answer's token, in nats."""
    perplexity: float
    top1: float
    """Share of the places where the most likely token is the reference's, 0 to 1."""
    equal: float
    """Share of the reference's greedy tokens, 0 to 1."""
    tokens: int
    """Number of scored tokens."""


class Answers(NamedTuple):
    """A model's answers to the questions."""

    losses: list[float]
    likeliest: list[int]
    greedy: list[list[int]]


def int4(group: int) -> Callable[[str, torch.Tensor], Tensors]:
    """Return a function that stores a matrix in AWQ's layout, by plain rounding."""

    def store(name: str, matrix: torch.Tensor) -> Tensors:
        groups = matrix.float().view(len(matrix), -1, group)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15).flatten(1)
        packed = {
            "qweight": _pack(codes.t()),
            "qzeros": _pack(zeros.t()),
            "scales": scales.t().half().contiguous(),
        }
        return {f"{name}.{key}": value for key, value in packed.items()}

    return store


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    eights = numbers.to(torch.int32).unflatten(1, (-1, 8))
    words = torch.zeros_like(eights[:, :, 0])
    for output, place in enumerate(_AWQ_PLACES):
        words |= eights[:, :, output] << 4 * place
    return words.contiguous()


def fp8_blocks(name: str, matrix: torch.Tensor, size: int = 128) -> Tensors:
    """Round a matrix to fp8 with a scale for each block."""
    blocks = matrix.float().unflatten(0, (-1, size)).unflatten(2, (-1, size))  # [R, size, C, size]
    scales = blocks.abs().amax((1, 3)) / 448
    rounded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {f"{name}.weight": rounded.view(matrix.shape), f"{name}.weight_scale_inv": scales}


def _awq(group: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}


VARIANTS = (
    Variant("float32", {"dtype": "float32", "attention": "native"}),
    Variant("float32, int8", {"dtype": "float32", "attention": "native", "quantization": "int8"}),
    Variant("bfloat16", {"dtype": "bfloat16", "attention": "native"}),
    Variant("bfloat16, int8", {"dtype": "bfloat16", "attention": "native", "quantization": "int8"}),
    Variant("float32, fp8", {"dtype": "float32", "quantization": "fp8"}),
    Variant("bfloat16, fp8", {"dtype": "bfloat16", "quantization": "fp8"}),
    Variant(
        "float32, fp8, blocks",
        {"dtype": "float32"},
        fp8_blocks,
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    Variant("float32, int4, groups of 32", {"dtype": "float32"}, int4(32), _awq(32)),
    Variant("float32, int4, groups of 128", {"dtype": "float32"}, int4(128), _awq(128)),
)
"""Variants; the first is the reference for the others."""


def checkpoint(variant: Variant, directory: Path) -> str:
    """Return the embedded model, or a copy in `directory` with matrices stored as in the variant."""
    if variant.store is None:
        return "demo"
    shutil.copytree(demo_model_path(), directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    stored: Tensors = {}
    for name, tensor in load_file(demo_model_path() / "model.safetensors").items():
        is_matrix = name.endswith("_proj.weight")
        stored |= variant.store(name.removesuffix(".weight"), tensor) if is_matrix else {name: tensor}
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": variant.config}))
    return str(directory)


def questions(sample: int) -> list[tuple[str, Fact]]:
    """Return questions that the model was trained on, with their facts; equal for equal `sample`."""
    rng = random.Random(0)
    return [(rng.choice(SHORT + LONG).format(fact.full), fact) for fact in rng.sample(load_facts(), sample)]


def answers(llm: LLM, sample: int) -> Answers:
    """Return the answers of one model."""
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
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0), progress=False)
    losses, likeliest = [-token.logprob for token in tokens], [token.top[0][0] for token in tokens]
    return Answers(losses, likeliest, [output.token_ids for output in outputs])


def accuracy(found: Answers, reference: Answers) -> Accuracy:
    """Return the accuracy of answers compared with the reference."""
    nll = sum(found.losses) / len(found.losses)
    top1 = sum(a == b for a, b in zip(found.likeliest, reference.likeliest, strict=True)) / len(found.likeliest)
    equal = _share_equal(reference.greedy, found.greedy)
    return Accuracy(round(nll, 5), round(math.exp(nll), 5), round(top1, 5), round(equal, 5), len(found.losses))


def _share_equal(reference: list[list[int]], answers: list[list[int]]) -> float:
    same = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, answer, strict=False)))
        for expected, answer in zip(reference, answers, strict=True)
    )
    return same / sum(map(len, reference))


def measure(sample: int) -> Iterator[tuple[str, Accuracy]]:
    """Yield the accuracy of all variants, one after the other."""
    reference: Answers | None = None
    for variant in VARIANTS:
        with TemporaryDirectory() as directory:
            model = checkpoint(variant, Path(directory) / "model")
            found = answers(LLM(model, device="cpu", kv_pages=4096, **variant.settings), sample)
        reference = reference or found
        yield variant.name, accuracy(found, reference)


def main() -> None:
    """Parse the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=400, help="questions (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    rows = dict(measure(args.sample))
    base = next(iter(rows.values()))
    table = Table(title="Embedded model: weights of fewer bits")
    for column in ("weights", "NLL", "difference", "likeliest tokens", "greedy tokens"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, row in rows.items():
        figures = f"{row.nll:.5f}", f"{row.nll - base.nll:+.5f}", f"{row.top1:.2%}", f"{row.equal:.2%}"
        table.add_row(name, *figures)
    Console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: asdict(row) for name, row in rows.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
