"""A rank of an engine, as `engine.ranks.worker`, whose weights are random: no file has any."""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec

from benchmarks.gpu_sections.random_model import random_decoder
from engine.loading.load_model import load_model
from engine.ranks import worker
from engine.ranks.launcher import RankSpec

if __name__ == "__main__":
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankSpec)
    worker.load_model = partial(load_model, load_weights=random_decoder)  # type: ignore[attr-defined]
    worker.work(spec, lambda: os._exit(0))
