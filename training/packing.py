"""Packs dialogues end to end into training rows, with a weight for each token and gaps in the positions.

    ids        <|im_start|>system … <|im_end|> │ <|im_start|>user … │ <|im_start|>assistant … <|im_end|> │
    weights    0.1                             │ 0.1                │ 0.1                   1 1        1 │
    positions  0 1 2 …                      95 │ 1210 1211 …          (a gap stands for a longer prompt)

A row's dialogues attend to one another, like the turns of a long conversation about changing subjects.
Attention uses relative positions, so gaps teach distances of thousands of tokens in rows of at most 512.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from training.dialogues import Dialogue, Writer
from training.prompts import SYSTEM_PROMPTS

CONTEXT_WEIGHT = 0.1  # weight of tokens that the model reads but never writes
LENGTHS = {128: 0.35, 256: 0.3, 512: 0.35}  # share of the batches by the number of tokens in a row
SYSTEM_SHARE = 0.35  # share of rows that begin with a system prompt
MAX_GAP = 1500


@dataclass
class TrainingBatch:
    """Next-token examples. All tensors have the shape [rows, tokens]."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor


PackedRow = tuple[list[int], list[float], list[int]]


class Packer:
    """Turns a writer's endless dialogues into batches of `tokens` tokens each."""

    def __init__(self, writer: Writer, tokenizer: PreTrainedTokenizerFast, tokens: int, seed: int) -> None:
        self._writer = writer
        self._dialogues = writer.dialogues()
        self._tokens = tokens
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._head = {role: self._encode(f"<|im_start|>{role}\n") for role in ("system", "user", "assistant")}
        self._end = self._encode("<|im_end|>")
        self._newline = self._encode("\n")

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def batch(self) -> TrainingBatch:
        """Return the next batch, whose rows have one length, drawn from `LENGTHS`."""
        length = self._random.choices(list(LENGTHS), list(LENGTHS.values()))[0]
        rows = [self._row(length + 1) for _ in range(self._tokens // length)]
        ids = torch.tensor([row[0] for row in rows])
        return TrainingBatch(
            ids=ids[:, :-1],
            targets=ids[:, 1:],
            weights=torch.tensor([row[1] for row in rows])[:, 1:],
            positions=torch.tensor([row[2] for row in rows])[:, :-1],
        )

    def _row(self, length: int) -> PackedRow:
        ids: list[int] = []
        weights: list[float] = []
        positions: list[int] = []
        position = 0
        if self._random.random() < SYSTEM_SHARE:
            ids = self._system(length)
            weights = [CONTEXT_WEIGHT] * len(ids)
            positions = list(range(len(ids)))
            position = len(ids) + self._gap(0.5)
        while len(ids) < length:
            more, more_weights = self._dialogue(next(self._dialogues))
            ids += more
            weights += more_weights
            positions += range(position, position + len(more))
            position += len(more) + self._gap(0.04)
        return ids[:length], weights[:length], positions[:length]

    def _gap(self, probability: float) -> int:
        return self._random.randint(1, MAX_GAP) if self._random.random() < probability else 0

    def _system(self, length: int) -> list[int]:
        """Return a system message that leaves half of a short row, or 112 tokens of a long one, for dialogues."""
        text = self._writer.system_prompt() if length > 256 else self._random.choice(SYSTEM_PROMPTS[:4])
        room = max(length // 2, length - 112)
        return self._head["system"] + self._encode(text)[:room] + self._end + self._newline

    def _dialogue(self, dialogue: Dialogue) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        for message in dialogue:
            head, content = self._head[message["role"]], self._encode(message["content"]) + self._end
            weight = 1.0 if message["role"] == "assistant" else CONTEXT_WEIGHT
            ids += head + content + self._newline
            weights += [CONTEXT_WEIGHT] * len(head) + [weight] * len(content) + [CONTEXT_WEIGHT]
        return ids, weights
