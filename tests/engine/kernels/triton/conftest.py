"""Kernels for GPUs run in Triton's interpreter, wherever there is none: told before anybody imports Triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
