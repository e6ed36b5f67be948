"""Trains the embedded model from facts.json: tokenizer, 6M-parameter Qwen3, about 20 minutes on two cores.

    python -m training.train --out deployments/demo_model

The seed fixes the dialogues, their order and the initial weights. A checkpoint in the final format is written
every `--save-every` steps, so an interrupted run leaves a usable model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training.corpus import load_facts
from training.dialogues import Writer
from training.packing import Packer, TrainingBatch
from training.vocabulary import train_tokenizer

HERE = Path(__file__).parent
MODEL = HERE.parent / "deployments" / "demo_model"


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Create the untrained model. Its 4,096 positions hold a long system prompt and a long chat."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 80) -> float:
    """Return the rate of a step: linear warm-up, then a cosine down to a hundredth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(model: Qwen3ForCausalLM, batch: TrainingBatch) -> tuple[torch.Tensor, float]:
    """Return (weighted mean cross entropy, unweighted mean over the assistant's tokens)."""
    with torch.autocast("cpu", torch.bfloat16):
        # The mask marks one sequence; without it transformers treats a gap in the positions as a boundary.
        mask = torch.ones_like(batch.ids)
        logits = model(batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False).logits
    each = F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), reduction="none")
    weights = batch.weights.flatten()
    spoken = each.detach()[weights == 1.0]
    return (each * weights).sum() / weights.sum(), float(spoken.mean())


class Progress:
    """Prints the progress of the training, and measures its time."""

    def __init__(self, steps: int, tokens: int) -> None:
        self.steps, self.tokens = steps, tokens
        self.loss = math.nan  # of the assistant's tokens, smoothed over about 20 steps
        self._started = time.perf_counter()

    @property
    def wall(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def step(self, done: int, loss: float) -> None:
        """Count step number `done` (from 1), and print a line every 20 steps."""
        self.loss = loss if done == 1 else 0.95 * self.loss + 0.05 * loss
        if done % 20 == 0 or done == self.steps:
            rate = done * self.tokens / self.wall
            eta = self.wall / done * (self.steps - done)
            print(
                f"step {done:5d}/{self.steps}  loss {self.loss:.4f}  {rate:5.0f} tokens/s  "
                f"{self.wall / 60:5.1f} min, {eta / 60:4.1f} to go, CPU {time.process_time() / 60:5.1f} min",
                flush=True,
            )


def train(args: argparse.Namespace) -> None:
    """Run the training and write the model directory."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    facts = load_facts()
    tokenizer = train_tokenizer(Writer(facts, args.seed))
    packer = Packer(Writer(facts, args.seed + 1), tokenizer, args.tokens, args.seed + 2)
    model = build_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.97), weight_decay=0.01)
    print(f"{len(facts)} facts, {model.num_parameters() / 1e6:.2f}M parameters, {args.steps} steps")

    progress = Progress(args.steps, args.tokens)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss, spoken = loss_of(model, packer.batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step(step + 1, spoken)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(model, tokenizer, args.out)
    save_record(args, len(facts), progress)


def save_record(args: argparse.Namespace, num_facts: int, progress: Progress) -> None:
    """Write training.json: the settings, versions and time with which the weights were trained."""
    record = {
        "seed": args.seed,
        "steps": args.steps,
        "tokens": args.steps * args.tokens,
        "facts": num_facts,
        "final_loss": round(progress.loss, 4),
        "wall_seconds": round(progress.wall),
        "cpu_seconds": round(time.process_time()),
        "threads": args.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (HERE / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the directory in Hugging Face layout. Weights are last and atomic, so no reader sees half a file."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    model.config.architectures = ["Qwen3ForCausalLM"]
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(out)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    partial = out / "model.safetensors.part"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, default=MODEL, help="the model directory to write")
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens per step")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=300, help="steps between checkpoints")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
