"""The base of values that are made for every token: msgspec's structs, or dataclasses if it is not installed.

The engine also runs on a bare GPU machine with only torch, Triton, transformers and safetensors. The dataclasses
are not frozen: making a frozen one takes seven times as long as making a struct, making an ordinary one twice as
long.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct as Struct
    from msgspec import field as field
else:
    try:
        from msgspec import Struct, field
    except ImportError:
        field = dataclasses.field

        class Struct:
            """Makes a dataclass of each subclass, with its annotated names as fields."""

            def __init_subclass__(cls, **options: Any) -> None:
                """`options` are msgspec's; they do not change the meaning of a struct."""
                dataclasses.dataclass(unsafe_hash=True)(cls)
