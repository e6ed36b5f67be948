"""Scores continuations as lm-eval's `hf` model does, with the interpreter that has transformers.

standard input      [[ids of a context, ids of its continuation], ...]
standard output     [[log-likelihood, whether it is the likeliest continuation], ...]
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Score what standard input has with the model in the directory that is the argument."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    scores = []
    with torch.inference_mode():
        for context, continuation in json.load(sys.stdin):
            ids = torch.tensor([[*context, *continuation]])
            logprobs = model(ids[:, :-1]).logits[0, -len(continuation) :].log_softmax(-1)
            chosen = torch.tensor(continuation)
            total = float(logprobs.gather(1, chosen[:, None]).sum())
            scores.append([total, bool((logprobs.argmax(-1) == chosen).all())])
    json.dump(scores, sys.stdout)


if __name__ == "__main__":
    main()
