"""Selects the implementation of a layer's operations for the model's device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from engine.attention.batch import AttentionBatch
from engine.layers.operations import Operations, Rotary
from engine.models.torch_operations import TorchOperations

logger = logging.getLogger(__name__)


def operations_for(rotary: Rotary) -> Callable[[AttentionBatch], Operations]:
    """Return the factory of a step's operations: Triton kernels on a GPU if Triton imports, else torch's."""
    if rotary.inv_freq.is_cuda:
        try:
            from engine.models.triton_operations import TritonOperations

            return partial(TritonOperations, rotary)
        except ImportError as error:
            logger.warning(
                "layers run on plain torch, which launches three times as many kernels: %s; install triton", error
            )
    return partial(TorchOperations, rotary)
