"""Compare ways in which ranks that each hold some whole experts of a mixture exchange tokens and results.

    python -m benchmarks.expert_exchange [--ranks 2 4] [--tokens 1 32 256 2048] [--per-token 2 8] [--json FILE]

Ranks are processes on this machine, connected by gloo. Attention is shared by heads: each rank has a part of every
token's output, and needs every token for the next layer. The home of a token is the rank that sums its parts.

    sums        Raydix' exchange: an all-reduce of attention's parts, after which each rank computes its own
                experts for all tokens, and an all-reduce of the experts' outputs
    to_home     an all-reduce of attention's parts; ranks with some of a token's experts send their output to its
                home; an all-gather of the sums
    to_experts  a reduce-scatter of attention's parts to the homes; each home sends its tokens to the ranks of
                their experts and gets the outputs back (two all-to-alls); an all-gather of the sums

With P ranks and E experts, of which a token uses k, a rank has some of a token's experts with the probability
q = 1 - C(E - E / P, k) / C(E, k), if all are equally likely. For each token and layer, a rank sends (P - 1) / P
times the token's size times 4, 3 + q or 2 + 2 q.

Experts are not computed, because all exchanges compute the same ones: a rank multiplies a token by its experts'
shares XX
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import this_machine

NAMES = ("sums", "to_home", "to_experts")
EXPERTS = 64
HIDDEN = 2048
LINKS = {"NVLink": 450e9, "400 Gbit/s": 50e9, "25 Gbit/s": 3.125e9}
"""Bytes per second that a GPU sends, at best."""
MODELS = {
    "Mixtral-8x7B": (4096, 32, 8, 2),
    "Qwen3-30B-A3B": (2048, 48, 128, 8),
    "Qwen3-235B-A22B": (4096, 94, 128, 8),
}
"""The size of a hidden state, and how many layers, experts and experts of each token a model has."""
RANKS_OF_MODELS = (4, 8)
TOKENS_OF_MODELS = 256
_BFLOAT16_BYTES = 2
_WARM_UP_CALLS = 3
Row = dict[str, Any]


class Tokens(NamedTuple):
    """The tokens of a step, the same on all ranks."""

    x: torch.Tensor
    """[N, H]: the sum of attention's parts, which are equal."""
    chosen: torch.Tensor
    """int64 [N, k]: each token's experts."""
    shares: torch.Tensor
    """[N, k]"""

    @classmethod
    def random(cls, count: int, per_token: int) -> Tokens:
        """Return tokens whose experts are equally likely."""
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(count, HIDDEN, generator=generator)
        shares, chosen = torch.rand(count, EXPERTS, generator=generator).topk(per_token)
        return cls(x, chosen, shares)


class _Calls(NamedTuple):
    """Measurements of one exchange, a number for each call."""

    bytes: list[int]
    processor: list[float]
    durations: list[float]


class Rank:
    """One rank's part in each exchange."""

    def __init__(self, rank: int, size: int, tokens: Tokens) -> None:
        self._rank, self._size, self._tokens = rank, size, tokens
        self._count = len(tokens.x)
        self._own = -(-self._count // size)
        """Most tokens that have their home on one rank."""
        self.bytes_sent = 0
        """Bytes sent to the other ranks, if all-reduces and all-gathers pass data around a ring."""

    def sums(self) -> torch.Tensor:
        """Return the experts' outputs, [N, H], by two all-reduces."""
        x = self._all_reduced(self._part())
        return self._all_reduced(x * self._weights(slice(None), self._rank)[:, None])

    def to_home(self) -> torch.Tensor:
        """Return the experts' outputs, which are summed at each token's home."""
        x, weights = self._all_reduced(self._part()), self._weights(slice(None), self._rank)
        used = weights.nonzero()[:, 0]
        counts = (used // self._own).bincount(minlength=self._size).tolist()
        arriving = [self._weights(self._at_home(), rank).nonzero()[:, 0] for rank in range(self._size)]
        outputs = self._exchanged(x[used] * weights[used, None], counts, [len(rows) for rows in arriving])
        return self._all_gathered(outputs, torch.cat(arriving))

    def to_experts(self) -> torch.Tensor:
        """Return the experts' outputs; each rank has only the tokens at home there, and sends them to experts."""
        x = self._reduce_scattered(self._part())
        of_ranks = [self._weights(self._at_home(), rank) for rank in range(self._size)]
        leaving = [weights.nonzero()[:, 0] for weights in of_ranks]
        rows, counts = torch.cat(leaving), [len(each) for each in leaving]
        shares = torch.cat([weights[each] for weights, each in zip(of_ranks, leaving, strict=True)])
        arriving = torch.empty(self._size, dtype=torch.int64)
        dist.all_to_all_single(arriving, torch.tensor(counts))
        taken = self._exchanged(torch.cat((x[rows], shares[:, None]), 1), counts, arriving.tolist())
        outputs = self._exchanged(taken[:, :-1] * taken[:, -1:], arriving.tolist(), counts)
        return self._all_gathered(outputs, rows)

    def _part(self) -> torch.Tensor:
        return self._tokens.x / self._size

    def _at_home(self) -> slice:
        return slice(self._rank * self._own, (self._rank + 1) * self._own)

    def _weights(self, tokens: slice, rank: int) -> torch.Tensor:
        """Return the sum of each token's shares of a rank's experts, 0 if it uses none of them."""
        is_there = self._tokens.chosen[tokens] // (EXPERTS // self._size) == rank
        return (self._tokens.shares[tokens] * is_there).sum(1)

    def _all_reduced(self, part: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(part)
        self.bytes_sent += 2 * (self._size - 1) * part.nbytes // self._size
        return part

    def _reduce_scattered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sums of the tokens at home here, by an all-to-all, because gloo has no reduce-scatter."""
        counts = [len(part[rank * self._own : (rank + 1) * self._own]) for rank in range(self._size)]
        parts = self._exchanged(part, counts, [counts[self._rank]] * self._size)
        return parts.view(self._size, counts[self._rank], HIDDEN).sum(0)

    def _exchanged(self, rows: torch.Tensor, counts: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        """Send `counts` of the rows to the ranks in turn; return those that arrive, so many from each."""
        taken = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(taken, rows, list(arriving), list(counts))
        self.bytes_sent += (len(rows) - counts[self._rank]) * rows[:1].nbytes
        return taken

    def _all_gathered(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Sum the outputs of the tokens at home here, whose `rows` are given, and return all ranks' sums."""
        own = outputs.new_zeros(self._own, HIDDEN).index_add_(0, rows, outputs)
        gathered = own.new_empty(self._size * self._own, HIDDEN)
        dist.all_gather(list(gathered.chunk(self._size)), own)
        self.bytes_sent += (self._size - 1) * own.nbytes
        return gathered[: self._count]


def run_rank(rank: int, size: int, port: int, cases: list[tuple[int, int]], seconds: float, found: Any) -> None:
    """Measure all cases on one rank, and put the list of results, one for each case, into the queue `found`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    results = []
    for case in cases:
        tokens = Tokens.random(*case)
        own, expected = Rank(rank, size, tokens), tokens.x * tokens.shares.sum(1)[:, None]
        results.append(measured(own, expected, seconds))
    found.put(results)
    dist.barrier()
    dist.destroy_process_group()


def measured(own: Rank, expected: torch.Tensor, seconds: float) -> Row:
    """Return what a call of each exchange costs this rank and how long it takes. The exchanges take turns."""
    calls = {name: _Calls([], [], []) for name in NAMES}
    began = time.perf_counter()
    for name in NAMES * _WARM_UP_CALLS:
        torch.testing.assert_close(getattr(own, name)(), expected)
    rounds = torch.tensor(max(5, int(seconds * _WARM_UP_CALLS / (time.perf_counter() - began))))
    dist.broadcast(rounds, 0)  # All ranks make as many calls.
    for name in NAMES * int(rounds):
        sent, processor, began = own.bytes_sent, processor_s(), time.perf_counter()
        getattr(own, name)()
        calls[name].durations.append(time.perf_counter() - began)
        calls[name].processor.append(processor_s() - processor)
        calls[name].bytes.append(own.bytes_sent - sent)
    return {
        name: {
            "bytes": statistics.mean(found.bytes),
            "processor_us": statistics.median(found.processor) * 1e6,
            "duration_us": statistics.median(found.durations) * 1e6,
        }
        for name, found in calls.items()
    }


def processor_s() -> float:
    """Return the processor time of this process's threads so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(size: int, cases: list[tuple[int, int]], seconds: float) -> Iterator[Row]:
    """Yield a row for each case, a number of tokens and of experts for each, with `size` ranks."""
    spawn = multiprocessing.get_context("spawn")
    found, port = spawn.Queue(), free_port()
    ranks = [
        spawn.Process(target=run_rank, args=(rank, size, port, cases, seconds, found)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    of_ranks = [found.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join()
    for (tokens, per_token), *results in zip(cases, *of_ranks, strict=True):
        row: Row = {"ranks": size, "tokens": tokens, "per_token": per_token, "expected": {}}
        for name, rows in rows_sent(size, EXPERTS, per_token).items():
            row["expected"][name] = rows * tokens * HIDDEN * 4
        for name in NAMES:
            parts = [one[name] for one in results]
            row[name] = {key: statistics.mean(part[key] for part in parts) for key in parts[0]}
        yield row


def rows_sent(ranks: int, experts: int, per_token: int) -> dict[str, float]:
    """Return how many times a token's size a rank sends for each token, on average."""
    has_some = 1 - math.comb(experts - experts // ranks, per_token) / math.comb(experts, per_token)
    times = {"sums": 4.0, "to_home": 3 + has_some, "to_experts": 2 + 2 * has_some}
    return {name: count * (ranks - 1) / ranks for name, count in times.items()}


def of_models() -> Iterator[Row]:
    """Yield the time that each link needs to send what a rank sends in a step of published models, in bfloat16."""
    for (model, (hidden, layers, experts, per_token)), ranks in product(MODELS.items(), RANKS_OF_MODELS):
        rows = rows_sent(ranks, experts, per_token)
        numbers = TOKENS_OF_MODELS * layers * hidden
        row: Row = {"model": model, "ranks": ranks, "rows": rows}
        for link, rate in LINKS.items():
            row[link] = {name: count * numbers * _BFLOAT16_BYTES / rate * 1e3 for name, count in rows.items()}
        yield row


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def show(console: Console, rows: list[Row], models: list[Row]) -> None:
    """Print the tables."""
    table = Table("ranks", "k", "tokens", *(f"{name}, {unit}" for unit in ("kB", "µs", "ms") for name in NAMES))
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("ranks", "per_token", "tokens")),
            *(f"{row[name]['bytes'] / 1e3 / row['tokens']:.3g}" for name in NAMES),
            *(f"{row[name]['processor_us']:.0f}" for name in NAMES),
            *(f"{row[name]['duration_us'] / 1e3:.3g}" for name in NAMES),
        )
    console.print(table, "kB sent by a rank for a token; processor time and duration of an exchange")
    table = Table("model", "ranks", *(f"{link}: {name}" for link in LINKS for name in NAMES))
    for row in models:
        times = (f"{row[link][name]:.3g}" for link in LINKS for name in NAMES)
        table.add_row(row["model"], str(row["ranks"]), *times)
    console.print(table, f"ms to send what a rank sends for {TOKENS_OF_MODELS} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 2048], help="tokens of a step")
    parser.add_argument(
        "--per-token", type=int, nargs="+", default=[2, 8], help=f"experts of {EXPERTS} that a token uses"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each case (%(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = list(product(options.tokens, options.per_token))
    rows = [row for size in options.ranks for row in measure(size, cases, options.seconds)]
    models = list(of_models())
    show(Console(width=150), rows, models)
    if options.json:
        settings = {"experts": EXPERTS, "hidden": HIDDEN, "tokens_of_models": TOKENS_OF_MODELS}
        result = {"machine": this_machine.described(), "settings": settings, "rows": rows, "models": models}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
