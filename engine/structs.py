"""Values that are made for every token: msgspec's structs, or dataclasses where it is not installed.

A bare GPU machine has torch, Triton, transformers and safetensors, and the engine runs on that. There they are not
frozen, as a frozen dataclass takes seven times as long to make as a struct, and others twice.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct as Struct
    from msgspec import field as field
    from msgspec.structs import replace as replace
else:
    try:
        from msgspec import Struct, field
        from msgspec.structs import replace
    except ImportError:
        field, replace = dataclasses.field, dataclasses.replace

        class Struct:
            """A subclass's annotated names are its fields."""

            def __init_subclass__(cls, **options: Any) -> None:
                """`options` are what msgspec may be told, which does not change what a struct means."""
                dataclasses.dataclass(unsafe_hash=True)(cls)
