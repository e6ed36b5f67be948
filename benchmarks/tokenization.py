"""Measure what turning a conversation into token ids costs an ingress.

    python -m benchmarks.tokenization [--json benchmarks/results/tokenization.json]

Three ways, measured in turns, in processor time of the thread, of which the best of all rounds counts:

    whole     `transformers` renders the chat template and encodes all of the text
    direct    the compiled template and the tokenizer's backend, without a cache
    cached    the same with the cache, which has the conversation up to its last two messages

and three conversations with the embedded model's tokenizer: a chat whose system prompt is known, one of 20
turns at its next turn, and the same when nothing of it is known.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import this_machine
from deployments.api.served.text_codec import TextCodec
from deployments.config.limits import Limits
from engine.model_files.model_directory import demo_model_path
from engine.text.tokenizer import load_tokenizer

ROUNDS = 30
Messages = list[dict[str, str]]
SYSTEM = (
    "You are a helpful assistant for the Python standard library. Answer in one short sentence, name the module "
    "first, and say so if you do not know. Do not write code unless you are asked for it, and never invent names "
    "that the library does not have. "
)
ANSWER = (
    "The module itertools has it: chain takes several iterables and yields the items of the first, then those of "
    "the second, and so on, as one iterator. With from_iterable it takes the iterables themselves from another, "
    "which may be endless. Both are lazy, so nothing is copied; use list() around them where all items are needed "
    "at once. "
)


def chat() -> Messages:
    """Return a chat of some 90 tokens."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What does itertools.chain do?"}]


def long_chat(num_turns: int = 20) -> Messages:
    """Return a conversation of thousands of tokens that ends with a question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(num_turns):
        messages.append(
            {"role": "user", "content": f"Question {turn}: how do I join iterables, and what of {turn}?"}
        )
        messages.append({"role": "assistant", "content": f"{turn}. {ANSWER * 4}"})
    return [*messages, {"role": "user", "content": "And how do I count the items?"}]


def measured(tokenizer: Any, messages: Messages, known: Messages) -> dict[str, Any]:
    """Return the microseconds of each way for a conversation of which `known` was encoded before."""
    uncached = TextCodec(tokenizer, max_cache_bytes=0)

    def whole() -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    best = {"whole": float("inf"), "direct": float("inf"), "cached": float("inf")}
    for _ in range(ROUNDS):
        codec = TextCodec(tokenizer)
        if known:
            codec.encode_chat(known)
        best["whole"] = min(best["whole"], _microseconds(whole))
        best["direct"] = min(best["direct"], _microseconds(lambda: uncached.encode_chat(messages)))
        best["cached"] = min(best["cached"], _microseconds(partial(codec.encode_chat, messages)))
    return {"tokens": len(whole()), "us": best}


def _microseconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e6


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the results")
    path = parser.parse_args().json
    tokenizer = load_tokenizer(demo_model_path())
    short, long = chat(), long_chat()
    cases = {
        "a chat, its system prompt known": (short, [short[0], {"role": "user", "content": "What is a deque?"}]),
        "the next of 20 turns": (long, long[:-2]),
        "20 turns, nothing known": (long, []),
    }
    rows = [{"what": what, **measured(tokenizer, *case)} for what, case in cases.items()]
    table = Table(title="microseconds of processor time")
    for column in ("", "tokens", "whole", "direct", "cached"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["what"], f"{row['tokens']:,}", *(f"{figure:,.0f}" for figure in row["us"].values()))
    Console().print(table)
    if path:
        machine = this_machine.described()
        cache_bytes = Limits().token_cache_bytes
        path.write_text(
            json.dumps({"machine": machine, "cache_bytes": cache_bytes, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
