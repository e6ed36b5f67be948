"""Answer a data set with Ray Data, on the cluster where the application runs.

    python examples/ray_data.py prompts.jsonl answers [--application raydix]

On the machine of a `raydix serve`, with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before it (docs/security.md, Network).
Needs `pip install "ray[data]"`. Each line of the input is an object with a prompt: {"prompt": "What is math.pi?"}.
The folder `answers` gets the same objects, each with `answer` and `error`, of which one is null.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
import ray.data
from ray import serve

FIELDS = {"max_tokens": 64, "temperature": 0}
"""What requests have besides their messages."""
BLOCK = 1024
"""Prompts in one call."""
CALLS = 2
"""Calls at a time. While one ends with its longest answers, another keeps the engines busy."""


def main() -> None:
    """Read the options and answer the data set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts")
    parser.add_argument("answers")
    parser.add_argument("--application", default="raydix", help="its name in the Serve config")
    options = parser.parse_args()

    ray.init(address="auto", ignore_reinit_error=True)
    ray.data.read_json(options.prompts, lines=True).map_batches(
        Asker,
        fn_constructor_args=(options.application,),
        batch_size=BLOCK,
        compute=ray.data.ActorPoolStrategy(size=CALLS),
        num_cpus=0,  # A worker mostly waits for answers.
    ).write_json(options.answers)


class Asker:
    """Adds the columns `answer` and `error` to blocks."""

    def __init__(self, application: str) -> None:
        self._handle = serve.get_app_handle(application).options(stream=True)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """Request the answers to all prompts of a block in one call."""
        chats = [[{"role": "user", "content": prompt}] for prompt in block["prompt"]]
        texts: list[str | None] = [None] * len(chats)
        errors: list[str | None] = [None] * len(chats)
        for answers in self._handle.generate_many.remote(chats, FIELDS):
            for answer in answers:
                texts[answer.index], errors[answer.index] = answer.text, answer.error
        return {**block, "answer": texts, "error": errors}


if __name__ == "__main__":
    main()
