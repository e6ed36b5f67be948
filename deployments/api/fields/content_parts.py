"""Takes the parts of a content: images and sounds, which text models cannot read, become a text that says so.

    [{"type": "text", "text": "Look:"}, {"type": "image_url", …}]
    ─▶ [{"type": "text", "text": "Look:"}, {"type": "text", "text": "[image omitted: this model reads only text]"}]

A conversation with one image must be able to continue, because the client sends it again with each later turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from deployments.api.base.errors import quoted
from deployments.api.fields.ignored import IgnoredFields, keep_known

TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The field with the text of a part, by the part's type. Others, such as `cache_control`, label it."""
TEXTS: Mapping[str, Set[str]] = {kind: frozenset({"type", field}) for kind, field in TEXT_OF.items()}
"""The fields of parts with text, by their type."""
_LONGEST_KIND = 32


def readable(content: object, ignored: IgnoredFields, path: str, kinds: Mapping[str, Set[str]] = TEXTS) -> object:
    """Return the content at `path` with a text instead of each part whose type is not in `kinds`, and with only
    known fields in the others. Any value but an array of typed parts stays unchanged. `kinds` has the known fields
    by type; without any, all are accepted. Raises `ApiError` 400 if the setting refuses the omitted ones.
    """
    if not isinstance(content, list) or all(_is_readable(part, kinds) for part in content):
        return content
    return [_readable(part, ignored, f"{path}.{index}", kinds) for index, part in enumerate(content)]


def _is_readable(part: object, kinds: Mapping[str, Set[str]]) -> bool:
    """Whether no field of a part is omitted, as for nearly all parts."""
    known = kinds.get(part["type"]) if isinstance(part, dict) and isinstance(part.get("type"), str) else ()
    return known is not None and (not known or part.keys() <= known)  # type: ignore[attr-defined]


def _readable(part: object, ignored: IgnoredFields, path: str, kinds: Mapping[str, Set[str]]) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        return part
    if kind not in kinds:
        return in_its_place(kind, ignored, path)
    known = kinds[kind]
    return keep_known(part, known, {}, ignored, f"{path}.") if known else part


def in_its_place(kind: str, ignored: IgnoredFields, path: str) -> dict[str, Any]:
    """Return the text that replaces a part of this type."""
    ignored.leave_out(path, kind, f"is a part of the type {quoted(kind)}, and this model reads only text")
    name = kind.removeprefix("input_").removesuffix("_url")[:_LONGEST_KIND]
    return {"type": "text", "text": f"[{name} omitted: this model reads only text]"}
