"""Prefixes that the operator puts in front of prompts: engines compute them at their start, for all tenants."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from deployments.config.section import Section
from engine.base.files import read_text

_MAX_BYTES = 2**26


class SharedPrefixSettings(Section):
    """One prefix that prompts of all tenants may begin with; see `cache/shared/shared_prefixes.py`."""

    text: str | None = Field(default=None, min_length=1)
    """The prefix itself; or give `file`."""
    file: str | None = None
    """A UTF-8 file with the prefix, read where the application is built. None: `text` has it."""
    kind: Literal["system", "prompt"] = "system"
    """Use of the text: the first system message of conversations without tools, or the beginning of raw
    prompts."""

    @model_validator(mode="after")
    def _is_in_one_place(self) -> Self:
        if (self.text is None) == (self.file is None):
            raise ValueError("a shared prefix has either text or file: give one of them")
        return self

    def read(self) -> SharedPrefixSettings:
        """Return it with its text. Raises ValueError when its file cannot be read."""
        if self.file is None:
            return self
        try:
            text = read_text(self.file, _MAX_BYTES)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"shared_prefixes: {self.file} cannot be read ({error}); name a UTF-8 file that exists where "
                "the application is built"
            ) from None
        return SharedPrefixSettings(text=text, kind=self.kind)
