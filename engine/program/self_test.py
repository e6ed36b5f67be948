"""Finds out whether the engine or a request made a step fail, by computing a harmless step of the same size.

    a step fails ─▶ the same step with harmless requests ─ computed ─▶ the engine is well: a request caused it
                                    ▲          │
                                    └─ failed ─┴─ several times ─────▶ the engine is sick, and ends
    its device is lost ──────────────────────────────────────────────▶ likewise, immediately

The harmless step has as many rows, tokens and tokens before them as the failed one, so it takes as much memory. It
has no token and no parameter of the requests, so no request can make a healthy engine look sick, however often it
is sent.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import Literal, get_args

from cache import KVCacheManager, Namespace, Scratch
from engine.base.errors import EngineBroken
from engine.values.plan import Chunk, StepPlan
from engine.values.request import Request
from engine.values.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FailureCause = Literal["memory", "device", "other"]
"""Why a step failed: it ran out of memory; its device can no longer compute; or something else."""
CAUSES: tuple[FailureCause, ...] = get_args(FailureCause)

NAMESPACE = Namespace("self-test")
"""The namespace of self-tests' requests, which no cache contains."""

# Seconds between two self-tests: other programs may give memory back meanwhile.
_PAUSE_S = 0.1

# Classes are compared by name, because this module does not import torch.
_MEMORY_CLASSES = {"MemoryError", "OutOfMemoryError"}
_MEMORY_TEXTS = ("out of memory", "allocate memory", "not enough memory", "bad_alloc", "alloc_failed")
_DEVICE_CLASSES = {"AcceleratorError"}
_DEVICE_TEXTS = ("cuda error", "hip error", "triton error [")
_ADVICE = {"memory": " (lower kv_memory_share or kv_pages, or else max_step_tokens or max_running)"}
"""Settings to change, by the cause of a failure."""
# Errors whose texts may begin like these, but after which the device continues to work: a library rejected a call.
_LIBRARY_TEXTS = ("cublas_status_", "cudnn_status_", "cusparse_status_", "cusolver_status_")


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause of a step's failure by its error."""
    classes, text = {kind.__name__ for kind in type(error).__mro__}, str(error).lower()
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if is_refused or classes & _MEMORY_CLASSES or any(part in text for part in _MEMORY_TEXTS):
        return "memory"
    is_of_device = any(part in text for part in _DEVICE_TEXTS) and not any(part in text for part in _LIBRARY_TEXTS)
    return "device" if classes & _DEVICE_CLASSES or is_of_device else "other"


class SelfTest:
    """Tracks whether the engine is well. Only the loop's thread changes it; any thread may read it."""

    def __init__(self) -> None:
        self.max_failed_steps = 3
        """Steps that may fail in a row, self-tests included, before the engine ends."""
        self.cause: FailureCause | None = None
        """The cause of a failure after which no self-test has passed; None if the engine is well."""
        self.counts = dict.fromkeys(CAUSES, 0)
        """How many steps have failed, self-tests included."""
        self._failed: StepPlan | None = None

    @property
    def is_due(self) -> bool:
        """Whether a step has failed and the engine is not tested yet."""
        return self._failed is not None

    def failed(self, plan: StepPlan, error: Exception) -> None:
        """Note that a step failed. Raises EngineBroken if its device can compute no other."""
        self._note(plan, error)
        # A later step may have failed because of the first failure, so the first failed step is tested.
        self._failed = self._failed or plan

    def _note(self, plan: StepPlan, error: Exception) -> None:
        ids = " ".join(chunk.request.request_id for chunk in plan.chunks)
        self.cause = cause_of(error)
        logger.error("a step of %d requests failed%s: %s", len(plan.chunks), self._advice, ids, exc_info=error)
        self.counts[self.cause] += 1
        if self.cause == "device":
            raise EngineBroken(f"its device failed: {error}") from error

    def run(self, cache: KVCacheManager, compute: Callable[[StepPlan], object]) -> None:
        """Compute the test, while no step is in flight. Raises EngineBroken if the engine cannot."""
        failed, self._failed, scratch = self._failed, None, cache.scratch()
        if failed is not None and scratch is not None:  # else requests hold all memory
            self._repeat(harmless(failed, scratch, cache.page_size), compute)
        self.cause = None

    def _repeat(self, test: StepPlan, compute: Callable[[StepPlan], object]) -> None:
        num_failed = 1
        while num_failed < self.max_failed_steps:
            try:
                compute(test)
                return
            except EngineBroken:
                raise
            except Exception as error:
                num_failed, last = num_failed + 1, error
                self._note(test, error)
            time.sleep(_PAUSE_S)
        reason = f"{num_failed} steps failed one after another, the last with {last!r}{self._advice}"
        raise EngineBroken(reason) from last

    @property
    def _advice(self) -> str:
        return _ADVICE.get(self.cause or "", "")


def harmless(failed: StepPlan, scratch: Scratch, page_size: int) -> StepPlan:
    """Return a step of the same size in `scratch`, without tokens and parameters of requests."""
    return StepPlan(
        tuple(_harmless(number, chunk, scratch, page_size) for number, chunk in enumerate(failed.chunks))
    )


def _harmless(number: int, failed: Chunk, scratch: Scratch, page_size: int) -> Chunk:
    sampling = SamplingParams(temperature=0.0)
    request = Request.make(f"self-test-{number}", (), sampling, arrival=0.0, seed=0, namespace=NAMESPACE)
    start, num_tokens = failed.start, failed.num_tokens
    num_pages = -(-(start + num_tokens) // page_size)
    return Chunk(
        request,
        start,
        num_tokens,
        [0] * num_tokens,
        scratch.pages(num_pages),
        failed.samples,
        state=scratch.state(start),
        window=scratch.window(num_pages),
    )
