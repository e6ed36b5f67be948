"""Compute how even the load of ranks with whole experts would be, with copies of experts, from recorded routing.

    python -m benchmarks.expert_copies NAME=LOG ... [--ranks 2 4 8] [--copies 0 1 2 4] [--json FILE]

A line of a log is a token of one layer: {"layer": 0, "topk_ids": [7, 43, 5, 58]}; other lines are ignored. Copies
are chosen by the first half of a log, as the engine chooses them, and used for the second half. A model has one
more expert than the largest number in its log; numbers of ranks that do not divide it are left out.

    imbalance    tokens of the busiest rank's experts over the mean of the ranks, averaged over layers
    first half   the imbalance of the tokens by which the copies were chosen, as if demand did not change
    rearranged   the same without copies, if each rank had other experts of its own, chosen by the first half too
    steps of N   the mean imbalance of every N tokens together, without copies
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.models.expert_copies import NOTHING, busiest, chosen

STEPS = (32, 256)
Row = dict[str, Any]
Tokens = list[list[int]]
"""Each token's experts."""


def read(log: Path) -> list[Tokens]:
    """Return the tokens of each layer; those with the experts of the token before are padding, and left out."""
    layers = defaultdict[int, Tokens](list)
    for line in log.read_text("utf-8").splitlines():
        found = json.loads(line)
        if "topk_ids" in found:
            layers[found["layer"]].append(found["topk_ids"])
    return [
        [after for before, after in pairwise(([], *tokens)) if after != before]
        for _, tokens in sorted(layers.items())
    ]


def counted(tokens: Tokens, num_experts: int) -> list[int]:
    """Return the tokens of each expert."""
    counts = [0] * num_experts
    for experts in tokens:
        for expert in experts:
            counts[expert] += 1
    return counts


def imbalance(counts: Sequence[int], placement: list[list[int]]) -> float:
    """Return the tokens of the busiest rank, divided by the mean of all ranks."""
    return busiest(counts, placement) * len(placement) / sum(counts)


def rearranged(counts: Sequence[int], num_ranks: int) -> list[int]:
    """Return the experts in an order in which the loads of equal parts are about even."""
    most = len(counts) // num_ranks
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(counts)), key=lambda one: -counts[one]):
        free = [part for part in parts if len(part) < most]
        min(free, key=lambda part: sum(counts[one] for one in part)).append(expert)
    return [expert for part in parts for expert in part]


def measure(layers: list[Tokens], num_experts: int, num_ranks: int, copies: Sequence[int]) -> Row:
    """Return the means over layers with so many ranks."""
    found = defaultdict[str, list[float]](list)
    nothing = [[NOTHING]] * num_ranks
    for tokens in layers:
        half = len(tokens) // 2
        before, after = (counted(part, num_experts) for part in (tokens[:half], tokens[half:]))
        for count in copies:
            placement = chosen(before, num_ranks, count) if count else nothing
            found[f"copies {count}"].append(imbalance(after, placement))
            found[f"first half, copies {count}"].append(imbalance(before, placement))
        order = rearranged(before, num_ranks)
        found["rearranged"].append(imbalance([after[expert] for expert in order], nothing))
        for size in STEPS:
            found[f"steps of {size}"].append(
                statistics.mean(of_steps(tokens[half:], num_experts, num_ranks, size))
            )
    return {"ranks": num_ranks, **{name: statistics.mean(values) for name, values in found.items()}}


def of_steps(tokens: Tokens, num_experts: int, num_ranks: int, size: int) -> Iterator[float]:
    """Yield the imbalance of each `size` tokens, without copies."""
    for start in range(0, len(tokens) - size + 1, size):
        yield imbalance(counted(tokens[start : start + size], num_experts), [[NOTHING]] * num_ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="NAME=LOG", help="a model's name, and its recorded routing")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--copies", type=int, nargs="+", default=[0, 1, 2, 4], help="slots for copies on each rank"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for log in options.logs:
        name, _, path = log.partition("=")
        layers = read(Path(path))
        count = 1 + max(expert for tokens in layers for experts in tokens for expert in experts)
        facts = {"model": name, "layers": len(layers), "tokens": min(map(len, layers))}
        facts |= {"experts": count, "used": len(layers[0][0])}
        sizes = [ranks for ranks in options.ranks if count % ranks == 0]
        rows += [facts | measure(layers, count, ranks, options.copies) for ranks in sizes]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=150).print(table)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
