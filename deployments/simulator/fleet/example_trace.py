"""The default trace of `raydix simulate`: an hour of a small service's made-up conversations.

    assistants (system prompts) ─┬─ conversations: question, answer, question, ...   most requests
                                 └─ documents ── conversations about them             long prompts, shared by some

It has no recorded traffic: `python -m deployments.simulator.fleet.example_trace` draws it from a fixed seed.
Lengths and pauses are log-normal, as in published traces; conversations begin at random, twice as often in the
busiest minutes as in the quietest.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

from deployments.simulator.fleet.trace import BLOCK_TOKENS

EXAMPLE = Path(__file__).with_name("example.jsonl.gz")
"""The file, in Mooncake's form."""
SEED = 20_250_101
_DURATION_S = 3600.0
_NUM_CONVERSATIONS = 1200
_MEAN_TURNS = 3.5
_MAX_PROMPT = 60_000
"""Tokens after which a conversation ends."""
_ASSISTANTS = ((1400, 8), (2600, 5), (600, 4), (5200, 2), (900, 1))
"""For each assistant: tokens of its system prompt and tools, and how much it is used."""
_DOCUMENT_SHARE = 0.2
"""Conversations that are about a document."""
_NUM_DOCUMENTS = 60


def requests(seed: int = SEED) -> list[dict[str, Any]]:
    """Return the trace's records in the order of their times."""
    rng = random.Random(seed)
    documents = [(rng.choice(_ASSISTANTS), _about(rng, 9000, 0.7)) for _ in range(_NUM_DOCUMENTS)]
    records = [record for number in range(_NUM_CONVERSATIONS) for record in _conversation(rng, number, documents)]
    records.sort(key=lambda record: record[0])
    ids: dict[Hashable, int] = {}
    return [
        {
            "timestamp": round(1000 * time),
            "input_length": num_tokens,
            "output_length": num_output,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in blocks],
        }
        for time, num_tokens, num_output, blocks in records
    ]


def _conversation(
    rng: random.Random, number: int, documents: list[tuple[tuple[int, int], int]]
) -> Iterator[tuple[float, int, int, list[Hashable]]]:
    """Yield time, prompt tokens, output tokens and the names of the prompt's blocks of each turn."""
    shared: list[tuple[Hashable, int]] = []
    """The beginning of the prompt that others share, and where each part ends, in tokens."""
    if rng.random() < _DOCUMENT_SHARE:
        chosen = min(int(rng.paretovariate(0.9)) - 1, _NUM_DOCUMENTS - 1)
        assistant, length = documents[chosen]
        shared += [(assistant, assistant[0]), (("document", chosen), assistant[0] + length)]
    else:
        assistant = rng.choices(_ASSISTANTS, [use for _, use in _ASSISTANTS])[0]
        shared += [(assistant, assistant[0])]
    time, num_tokens = _start(rng), shared[-1][1]
    while True:
        num_tokens += _about(rng, 90, 1.1)
        if time > _DURATION_S or num_tokens > _MAX_PROMPT:
            return
        num_output = min(_about(rng, 220, 0.8), 4000)
        yield time, num_tokens, num_output, _blocks(shared, number, num_tokens)
        if rng.random() < 1 / _MEAN_TURNS:
            return
        num_tokens += num_output
        time += 0.02 * num_output + rng.lognormvariate(math.log(35), 1.0)


def _blocks(shared: list[tuple[Hashable, int]], number: int, num_tokens: int) -> list[Hashable]:
    """Name a prompt's blocks: equal names for equal prefixes."""
    names: list[Hashable] = []
    for index in range(-(-num_tokens // BLOCK_TOKENS)):
        end = (index + 1) * BLOCK_TOKENS
        part = next((name for name, stop in shared if end <= stop), number)
        names.append((part, index) if end <= num_tokens else (part, index, num_tokens))
    return names


def _start(rng: random.Random) -> float:
    """Return when a conversation begins, in seconds: three waves in the hour, by rejection sampling."""
    while True:
        time = rng.uniform(0, _DURATION_S)
        if rng.random() < (3 + math.sin(6 * math.pi * time / _DURATION_S)) / 4:
            return time


def _about(rng: random.Random, median: float, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))


def text(seed: int = SEED) -> str:
    """Return the trace as JSON lines."""
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in requests(seed))


if __name__ == "__main__":
    EXAMPLE.write_bytes(gzip.compress(text().encode(), mtime=0))
