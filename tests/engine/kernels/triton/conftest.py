"""GPU kernels run in Triton's interpreter where there is no GPU, which is set before Triton is imported."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError(
            "a test module has imported Triton, or what imports it, before: do it in a function there"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from tests.engine.support.quick_interpreter import quicken

        quicken()
