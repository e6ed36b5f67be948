"""The base of all request models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """No string becomes a number, no number a boolean, NaN is no number, and unknown fields are errors."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True
    )
