"""The base classes of all request models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from deployments.api.fields.ignored import IgnoredFields

LEFT_OUT = "x-raydix-left-out"
"""Until the document is complete, the schema of an object has under this name a schema of the fields that are
omitted from such objects, or refused.
"""


class StrictModel(BaseModel):
    """Converts no types (strings to numbers, numbers to booleans) and refuses NaN and unknown fields."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that a body may have only with one of these values, or null, which have no effect."""

    @classmethod
    def taken(cls, fields: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
        """Return a body's fields without unsupported ones, which `ignored` names. Raises `ApiError` 400 if the
        setting refuses them.
        """
        return fields


class LeftOut(StrictModel):
    """An object of a type that this server cannot use: it is omitted, with all of its fields, or refused."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={LEFT_OUT: {}})
    type: str
