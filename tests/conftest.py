"""What holds for all tests: one thread of computation each, so that a busy machine does not slow tiny models, and
no test fails for being slow."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples each time: what fails, fails for everybody, and not on the day of somebody else's change.
# To look for others: --hypothesis-profile=search --hypothesis-seed=N
settings.register_profile("raydix", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("raydix")
