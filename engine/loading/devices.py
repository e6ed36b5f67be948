"""Resolves the settings `device` and `dtype`."""

from __future__ import annotations

import re

import torch

from engine.model_config.config import WeightType
from engine.settings.config import DType


def device_named(name: str) -> torch.device:
    """Return the device that the setting `device` means. Raises ValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise ValueError(f'device must be "auto", "cpu", "cuda" or one of several GPUs ("cuda:1"), got {name!r}')
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch finds no CUDA device; use "cpu" or a CUDA build of torch')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {name!r}, but torch finds {torch.cuda.device_count()} CUDA devices, numbered from 0; "
            'use one of them, or "cuda" for the first'
        )
    return device


def dtype_of(setting: DType, stored: WeightType, device: torch.device) -> torch.dtype:
    """Return the type of weights and KV; "auto" is the checkpoint's on a GPU, float32 on a CPU."""
    name = setting
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
