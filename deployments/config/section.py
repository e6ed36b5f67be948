"""The base of all sections of `deployments.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from engine.base.suggestions import unknown_setting


class Section(BaseModel):
    """Settings that do not change. Unknown ones are refused, with the one that was probably meant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and (message := unknown_setting(given, cls.model_fields)):
            raise ValueError(message)
        return given
