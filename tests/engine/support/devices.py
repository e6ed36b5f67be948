"""The device that kernels are tested on: a GPU if there is one, or else Triton's interpreter on the CPU."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
