"""Options for rendering a conversation, besides its messages and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Inputs of a chat template. Its variables come from the client, so they never become control tokens."""

    add_generation_prompt: bool = True
    """End where the model's answer begins."""
    continues: bool = False
    """End within the last message, which the model continues."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template; it looks at those that it knows."""

    @property
    def size(self) -> int:
        """About how many characters its texts have."""
        return _size(self.variables) if self.variables else 0


PLAIN_OPTIONS = TemplateOptions()


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _size(child) for key, child in value.items())
    return sum(map(_size, value)) if isinstance(value, list) else 1
