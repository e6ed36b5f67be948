"""The settings of a scheduler, which are part of an engine's."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("fair", "fcfs", "priority")
"""The names of the policies in `engine/scheduling/queue_policy.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Bounds of a scheduler's steps and queue. `EngineConfig` inherits these fields and checks their values."""

    max_running: int = 256
    """Most requests in one batch."""
    max_step_tokens: int = 2048
    """Most tokens computed in one step: bounds how long a long prompt can delay running decodes. Servers and `LLM`
    take 8192 on GPUs (`engine.settings.config.GPU_DEFAULTS`)."""
    max_step_ms: float | None = 100.0
    """Target length of a step with running decodes, in milliseconds: bounds its prefill. None: no target."""
    max_step_stretch: float | None = 0.75
    """How much longer each prompt may make a step with running decodes, as a share of the decodes' own time: with
    0.75 streams keep within twice the time per token while one long prompt is computed. None: no such bound."""
    policy: str = "priority"
    """Which requests go first: "fcfs", "priority" (with ageing) or "fair" (tenants take turns);
    see `engine/scheduling/queue_policy.py`."""
    priority_half_life_s: float = 30.0
    """Seconds of waiting that weigh as much as one level of priority."""
    fair_quantum_tokens: int = 256
    """Tokens of a tenant's turn when the policy is "fair"."""
    max_waiting: int = 1024
    """Most requests waiting for admission; more are rejected with "queue full"."""
    max_waiting_tokens: int = 4_000_000
    """Most uncomputed prompt tokens waiting; more are rejected with "queue full"."""
