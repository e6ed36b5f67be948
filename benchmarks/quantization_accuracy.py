<<<<<<< HEAD
"""What rounding to eight bits costs: the embedded model's answers, with `quantization: int8` for its weights or
`kv_dtype: fp8` for its KV, and without.

    python -m benchmarks.quantization_accuracy [--sample N] [--json benchmarks/results/quantization_accuracy.json]

Perplexity: of the docstring sentences that it was trained on, each after its question. Likeliest tokens: the share
of the sentences' places at which the unrounded float32 model's likeliest token is this one's too. Greedy tokens:
the share of that model's that come out the same, up to where an answer first differs.
=======
"""What weights of fewer bits cost: the embedded model's answers with them, and without.

    python -m benchmarks.quantization_accuracy [--sample N] [--json benchmarks/results/quantization_accuracy.json]

`int8` and `fp8` are the engine's setting. `int4` and `fp8, blocks` are checkpoints, made here by plain rounding:
four bits with a scale and a zero point for 32 or 128 inputs (packed as AWQ does), and fp8 with a scale for 128 x 128
weights, which the engine rounds once more. Quantizers that look at data lose less than plain rounding does.

Loss: of the docstring sentences that the model was trained on. Likeliest tokens: the share
of those tokens' places where the most likely one is the same. Greedy tokens: the share of the unrounded float32
model's that come out the same, up to where an answer first differs.
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)
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
from operator import eq
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from deployments.demo_model.corpus import Fact, load_facts
from deployments.demo_model.phrasings import LONG, SHORT
<<<<<<< HEAD
from engine.config import DType, KVDType, Quantization
from engine.llm import LLM
from engine.sampling_params import SamplingParams

VARIANTS: tuple[tuple[DType, Quantization | None, KVDType], ...] = (
    ("float32", None, "auto"),
    ("float32", "int8", "auto"),
    ("float32", None, "fp8"),
    ("bfloat16", None, "auto"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", None, "fp8"),
)
"""The first is what the others are compared with."""
=======
from engine.hub import demo_model_path
from engine.llm import LLM
from engine.sampling_params import SamplingParams

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In an int32, in units of four bits, of eight outputs."""
Tensors = dict[str, torch.Tensor]


class Variant(NamedTuple):
    name: str
    settings: dict[str, Any]
    store: Callable[[str, torch.Tensor], Tensors] | None = None
    """Makes a checkpoint: what stands for a matrix."""
    config: dict[str, Any] | None = None
    """And what config.json says of it."""
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)


@dataclass(frozen=True)
class Accuracy:
    """Of one variant."""

    nll: float
    """Mean negative log-likelihood of an answer's token, in nats."""
    perplexity: float
<<<<<<< HEAD
    likeliest: float
    """Share of the scored tokens at which the likeliest is the reference's, 0 to 1."""
=======
    top1: float
    """Share of the places where the most likely token is the reference's, 0 to 1."""
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)
    equal: float
    """Share of the reference's greedy tokens, 0 to 1."""
    tokens: int
    """That were scored."""


<<<<<<< HEAD
@dataclass(frozen=True)
class Answers:
    """What one variant makes of the questions."""

    likeliest: list[int]
    """Tokens at the scored places."""
    greedy: list[list[int]]
    """Tokens of each answer."""
=======
class Answers(NamedTuple):
    """What a model makes of the questions."""

    losses: list[float]
    likeliest: list[int]
    greedy: list[list[int]]


def int4(group: int) -> Callable[[str, torch.Tensor], Tensors]:
    """AWQ's layout, by plain rounding."""

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
    """A scale for each block."""
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
"""The first is what the others are compared with."""


def checkpoint(variant: Variant, directory: Path) -> str:
    """The embedded model, or a copy of it in `directory` with matrices stored as the variant does."""
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
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)


def questions(sample: int) -> list[tuple[str, Fact]]:
    """Questions the model was trained on, and what they are about; the same ones for the same `sample`."""
    rng = random.Random(0)
    return [(rng.choice(SHORT + LONG).format(fact.full), fact) for fact in rng.sample(load_facts(), sample)]


<<<<<<< HEAD
def measure(llm: LLM, sample: int, reference: Answers | None = None) -> tuple[Accuracy, Answers]:
    """Accuracy beside the answers `reference` (None: beside its own), and the answers."""
=======
def answers(llm: LLM, sample: int) -> Answers:
    """Of one model."""
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)
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
<<<<<<< HEAD
    greedy = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0), progress=False)
    answers = Answers([token.top[0][0] for token in tokens], [output.token_ids for output in greedy])
    reference = reference or answers
    nll = -sum(token.logprob for token in tokens) / len(tokens)
    likeliest = sum(map(eq, answers.likeliest, reference.likeliest)) / len(tokens)
    equal = _share_equal(reference.greedy, answers.greedy)
    perplexity, num_tokens = round(math.exp(nll), 5), len(tokens)
    return Accuracy(round(nll, 5), perplexity, round(likeliest, 5), round(equal, 5), num_tokens), answers
=======
    outputs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0), progress=False)
    losses, likeliest = [-token.logprob for token in tokens], [token.top[0][0] for token in tokens]
    return Answers(losses, likeliest, [output.token_ids for output in outputs])


def accuracy(found: Answers, reference: Answers) -> Accuracy:
    """Of answers, beside those of the reference."""
    nll = sum(found.losses) / len(found.losses)
    top1 = sum(a == b for a, b in zip(found.likeliest, reference.likeliest, strict=True)) / len(found.likeliest)
    equal = _share_equal(reference.greedy, found.greedy)
    return Accuracy(round(nll, 5), round(math.exp(nll), 5), round(top1, 5), round(equal, 5), len(found.losses))
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)


def _share_equal(reference: list[list[int]], answers: list[list[int]]) -> float:
    same = sum(
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, answer, strict=False)))
        for expected, answer in zip(reference, answers, strict=True)
    )
    return same / sum(map(len, reference))


def measure(sample: int) -> Iterator[tuple[str, Accuracy]]:
    """All variants, one after the other."""
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
<<<<<<< HEAD
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
=======
    rows = dict(measure(args.sample))
    base = next(iter(rows.values()))
    table = Table(title="Embedded model: weights of fewer bits")
    for column in ("weights", "NLL", "difference", "likeliest tokens", "greedy tokens"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, row in rows.items():
        figures = f"{row.nll:.5f}", f"{row.nll - base.nll:+.5f}", f"{row.top1:.2%}", f"{row.equal:.2%}"
        table.add_row(name, *figures)
>>>>>>> 487b70c (Accuracy of quantized weights: fp8 and int4 beside int8, likeliest tokens beside greedy ones)
    Console().print(table)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: asdict(row) for name, row in rows.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
