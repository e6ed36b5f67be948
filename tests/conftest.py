"""What holds for all tests: one thread of computation each, so that a busy machine does not slow tiny models, and
no test fails for being slow."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("raydix", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("raydix")
