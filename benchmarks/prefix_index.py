"""Measure the prefix index: hashing a prompt, looking it up, and applying the replicas' deltas.

    python -m benchmarks.prefix_index [--blocks 1000000] [--json benchmarks/results/prefix_index.json]

Runs in one process, without Ray or a model, for two minutes. A prompt has 32,768 tokens in blocks of 16. Look-ups
are measured warm (the same prompt repeatedly, whose blocks are in the CPU's caches) and cold (64 prompts in turn,
in an index of --blocks others). Figures are medians. Limits: hashing in 1 ms, a warm look-up over 64 replicas in
200 µs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from cache import KVCacheManager, Namespace
from cache.prefix_hash import block_hashes, prefix_root
from router.prefix_index import PrefixIndex

PROMPT_TOKENS, BLOCK_TOKENS, CHUNK_TOKENS = 32_768, 16, 2_048
CHAIN = PROMPT_TOKENS // BLOCK_TOKENS
SNAPSHOT = 131_072
"""Number of blocks of a replica with 2.1 million tokens of KV."""
PROMPTS = 64
CASES: dict[str, Callable[[int, int], int]] = {
    "nobody holds it": lambda number, count: 0,
    "all hold it": lambda number, count: CHAIN,
    "each to another depth": lambda number, count: CHAIN * (number + 1) // count,
}
"""For each case, the number of a prompt's blocks that replica `number` of `count` holds."""
Row = tuple[str, str, float, str, float | None]  # operation, case, figure, unit, limit


def main() -> None:
    options = _options()
    draw = random.Random(0)
    rows = [*hashing(draw), *lookups(draw, options.blocks), *news(draw, options.blocks)]
    rows += [*memory(draw), *recording(draw)]
    _print(rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        names = ("what", "of", "figure", "unit", "bar")
        results = [dict(zip(names, row, strict=True)) for row in rows]
        machine = {**this_machine.described(), "note": options.note}
        options.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")


def hashing(draw: random.Random) -> Iterable[Row]:
    """Measure hashing a prompt's blocks."""
    ids, root = [draw.randrange(150_000) for _ in range(PROMPT_TOKENS)], prefix_root(Namespace("m"))
    seconds = _median(lambda _: block_hashes(ids, root, BLOCK_TOKENS), range(200))
    yield "hash a prompt", f"{PROMPT_TOKENS:,} tokens", seconds * 1e3, "ms", 1.0


def lookups(draw: random.Random, num_blocks: int) -> Iterable[Row]:
    """Measure `match` for each case and number of replicas, in an index that holds `num_blocks` others."""
    for count in (64, 256, 1000):
        index, replicas = PrefixIndex(BLOCK_TOKENS), [f"replica-{number}" for number in range(count)]
        for replica in replicas:
            index.apply(replica, _blocks(draw, num_blocks // count), [])
        for case, depth in CASES.items():
            prompts = [_blocks(draw, CHAIN) for _ in range(PROMPTS)]
            for number, replica in enumerate(replicas):
                for prompt in prompts:
                    index.apply(replica, prompt[: depth(number, count)], [])
            # As from `block_hashes`, the numbers equal the index's but are other objects.
            prompts = [[int(str(block)) for block in prompt] for prompt in prompts]
            warm = _median(partial(index.match, now=0.0), prompts[:1] * 200)
            cold = _median(partial(index.match, now=0.0), prompts * 3)
            yield f"look up, warm: {case}", f"{count} replicas", warm * 1e6, "µs", 200.0 if count == 64 else None
            yield f"look up, cold: {case}", f"{count} replicas", cold * 1e6, "µs", None


def news(draw: random.Random, num_blocks: int) -> Iterable[Row]:
    """Measure deltas, snapshots and own dispatches in an index that holds `num_blocks` others."""
    index = PrefixIndex(BLOCK_TOKENS)
    for number in range(64):
        index.apply(f"replica-{number}", _blocks(draw, num_blocks // 64), [])
    deltas = [_blocks(draw, 1000) for _ in range(100)]
    for what, call in (
        ("take in new blocks", lambda delta: index.apply("replica-0", delta, [])),
        ("take in blocks others hold", lambda delta: index.apply("replica-1", delta, [])),
        ("take out blocks", lambda delta: index.apply("replica-0", [], delta)),
    ):
        seconds = _median(call, deltas)
        yield what, "deltas of 1,000", 1e-3 / seconds, "M blocks/s", None
    snapshot = _blocks(draw, SNAPSHOT)
    index.replace("replica-2", snapshot)
    seconds = _median(lambda _: index.replace("replica-2", snapshot), range(5))
    yield "replace by a snapshot", f"{SNAPSHOT:,} blocks", seconds * 1e3, "ms", None
    prompts = [_blocks(draw, CHAIN) for _ in range(50)]
    seconds = _median(lambda prompt: index.expect("replica-3", prompt, 0.0), prompts)
    yield "expect a dispatch", f"{CHAIN:,} new blocks", seconds * 1e6, "µs", None
    yield from _full(draw, num_blocks)


def _full(draw: random.Random, num_blocks: int) -> Iterable[Row]:
    """Measure what an index that is full costs, to which a prompt's blocks come among others."""
    index = PrefixIndex(BLOCK_TOKENS, max_blocks=num_blocks)
    for _ in range(num_blocks // 1000 + 1):
        index.apply("replica-0", _blocks(draw, 1000), [])
    prompts = [_blocks(draw, CHAIN) for _ in range(50)]
    for prompt in prompts:
        index.apply("replica-0", prompt, [])
    yield "mark a prompt, full index", f"{CHAIN:,} blocks", _median(index.use, prompts) * 1e6, "µs", None
    seconds = _median(lambda delta: index.apply("replica-0", delta, []), [_blocks(draw, 1000) for _ in range(200)])
    yield "take in new blocks, full index", "deltas of 1,000", 1e-3 / seconds, "M blocks/s", None


def memory(draw: random.Random) -> Iterable[Row]:
    """Measure bytes per block in the index and in a replica's own record."""

    def filled(replicas: int, holders: int) -> PrefixIndex:
        index = PrefixIndex(BLOCK_TOKENS)
        for number in range(replicas):
            blocks = _blocks(draw, 200_000 // replicas)
            for other in range(holders):
                index.apply(f"replica-{(number + other) % replicas}", blocks, [])
        return index

    for replicas, holders in ((64, 1), (64, 8), (1000, 8)):
        used = _allocated(partial(filled, replicas, holders))
        yield "index", f"{holders} of {replicas} hold it", used / 200_000, "bytes/block", None
    plain, recorded = (
        _allocated(partial(_serve, draw, 64, block_tokens)) for block_tokens in (None, BLOCK_TOKENS)
    )
    yield "record in a replica", "tree and log", (recorded - plain) / (64 * CHAIN), "bytes/block", None


def recording(draw: random.Random) -> Iterable[Row]:
    """Measure the cost of the record to the engine loop, and of reading it to the publisher."""
    for block_tokens in (None, BLOCK_TOKENS):
        cache, inserts = _serve(draw, 64, block_tokens)
        what = "insert, recorded" if block_tokens else "insert, no record"
        yield what, f"{CHUNK_TOKENS:,} tokens", statistics.median(inserts) * 1e6, "µs", None
    assert cache.prefix_log is not None
    log = cache.prefix_log
    seconds = _median(lambda _: log.drain(), range(1))
    num_blocks = len(list(log.snapshot()))
    yield "drain everything", f"{num_blocks:,} blocks", seconds * 1e3, "ms", None
    seconds = _median(lambda _: list(log.snapshot()), range(9))
    yield "snapshot", f"{num_blocks:,} blocks", seconds * 1e3, "ms", None


def _serve(draw: random.Random, num_prompts: int, block_tokens: int | None) -> tuple[KVCacheManager, list[float]]:
    """Return a cache that has served so many prompts, and the seconds of each chunk's insert."""
    cache = KVCacheManager(num_prompts * PROMPT_TOKENS // 16 + 1, 16, block_tokens=block_tokens)
    inserts = []
    for _ in range(num_prompts):
        ids = [draw.randrange(150_000) for _ in range(PROMPT_TOKENS)]
        lease = cache.lock(cache.match(Namespace("m"), ids, 0.0))
        cache.extend(lease, len(ids))
        for end in range(CHUNK_TOKENS, PROMPT_TOKENS + 1, CHUNK_TOKENS):
            began = time.perf_counter()
            cache.insert(lease, ids[:end], 0.0)
            inserts.append(time.perf_counter() - began)
        cache.finish(lease, ids, 0.0)
    return cache, inserts


def _blocks(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(64) for _ in range(count)]


def _median(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Return the median seconds of one call."""
    times = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _allocated(make: Callable[[], object]) -> int:
    """Return the bytes allocated for the result of `make`."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    made = make()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made is not None
    return after - before


def _print(rows: Sequence[Row]) -> None:
    table = Table(title="knowing every replica's cache")
    for column in ("what", "of", "figure", "unit", "bar"):
        table.add_column(column, justify="right" if column in ("figure", "bar") else "left")
    for what, of, figure, unit, bar in rows:
        colour = "" if bar is None else "[green]" if figure <= bar else "[red]"
        table.add_row(what, of, f"{colour}{figure:,.4g}", unit, "" if bar is None else f"{bar:g}")
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="other blocks in the index")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
