"""The setting `engines.roles`: replicas that compute prompts, and replicas that generate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class RoleSettings(BaseModel):
    """How many replicas compute long prompts, and how many generate; see `router/roles.py`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prefill: int = Field(ge=1)
    """Replicas that compute long prompts, and generate only their first tokens."""
    decode: int = Field(ge=1)
    """Replicas that go on with these, and do all of short prompts."""
    disaggregate_above_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Tokens of a prompt, cached on no replica that generates, above which it is computed apart. "auto": what
    takes a quarter of a second at the measured rate."""

    @property
    def count(self) -> int:
        """All replicas."""
        return self.prefill + self.decode
