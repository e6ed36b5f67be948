"""Decoders of quantized checkpoints, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.layers.linear import Fp8BlockLinear, Fp8Linear, Int4Linear
from engine.loading.weights import load_decoder
from engine.model_config.config import ModelConfig
from engine.models.decoder import Decoder


def load(directory: Path) -> Decoder:
    return load_decoder(directory, ModelConfig.from_directory(directory), torch.float32, torch.device("cpu"))


def load_packed(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, **settings: Any
) -> Decoder:
    """Load as `load_decoder` does, with experts in MXFP4 that stay packed, as on a GPU."""
    config = replace(config, experts=ModelConfig.from_directory(directory).experts)
    return load_decoder(directory, config, dtype, device, **settings)


def layers(decoder: Decoder) -> dict[str, Fp8Linear | Fp8BlockLinear | Int4Linear]:
    kinds = Fp8Linear | Fp8BlockLinear | Int4Linear
    return {name: module for name, module in decoder.named_modules() if isinstance(module, kinds)}


def memory(decoder: Decoder) -> int:
    """Bytes of all tensors; norms that are repeated for each head are counted once."""
    tensors = [*decoder.named_parameters(), *decoder.named_buffers()]
    return sum(
        tensor.unique(dim=0).nbytes if name.endswith("qk_norm") else tensor.nbytes for name, tensor in tensors
    )


def rounded(x: torch.Tensor, inputs: int | None = None) -> torch.Tensor:
    """Round each row, or each `inputs` numbers of it, to multiples of its largest number / 448 that float8_e4m3fn
    has. Where a number lies between two of them, the last bit of the quotient decides.
    """
    blocks = x.unflatten(-1, (-1, inputs or x.shape[-1]))
    unit = blocks.abs().amax(-1, keepdim=True) * (1 / 448)
    found: torch.Tensor = ((blocks / unit).to(torch.float8_e4m3fn).float() * unit).flatten(-2)
    return found
