"""The setting `engines.autoscaling`: how many engine replicas the work needs, and how soon their number
changes."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from deployments.config.section import Section


class AutoscalingSettings(Section):
    """Runs as many engine replicas as the work needs; see `deployments/replica/autoscaling.py`."""

    min: int = Field(default=1, ge=0)
    """Fewest replicas. With 0, a model that has none is loaded again by POST /v1/models/NAME/load."""
    max: int = Field(ge=1)
    """Most replicas."""
    initial: int | None = Field(default=None, ge=0)
    """Replicas at the start; None: `min`."""
    ttft_target_s: float = Field(default=1.0, gt=0)
    """Seconds that a prompt may wait for the prefill of others, on average over the replicas."""
    catch_up_s: float = Field(default=30.0, ge=0)
    """Seconds in which more replicas, once they are up, work off the work that waits beyond that."""
    max_busy_share: float = Field(default=0.85, gt=0, le=1)
    """Largest share of a replica's measured prefill rate that may be in use."""
    max_kv_share: float = Field(default=0.85, gt=0, le=1)
    """Largest share of a replica's KV pages, and of its places in the batch, that may be in use or waited for."""
    headroom: float = Field(default=0.3, ge=0, lt=1)
    """Share of these limits that stays free after scaling down, so that the number does not go up and down."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    """Seconds for which more replicas must be needed before they are started."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """Seconds for which fewer replicas must be needed before some are stopped."""
    downscale_to_zero_delay_s: float | None = Field(default=None, ge=0)
    """The same delay for the last replica, where `min` is 0; None: `downscale_delay_s`."""
    look_back_s: float = Field(default=6.0, gt=0)
    """Seconds of past reports that a decision averages over. Shorter than `upscale_delay_s`: a decision then sees
    nothing of the time before a burst, and one is enough."""
    report_s: float = Field(default=2.0, gt=0)
    """Seconds between two reports of a replica."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) must be at least min ({self.min})")
        if self.initial is not None and not self.min <= self.initial <= self.max:
            raise ValueError(f"initial ({self.initial}) must be from min ({self.min}) to max ({self.max})")
        return self
