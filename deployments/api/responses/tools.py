"""The tools of the Responses API as those of chat: without the object around each, and some in namespaces.

{"type": "function", "name": "f"}              ─▶  {"type": "function", "function": {"name": "f"}}
{"type": "namespace", "name": "crm", "tools":      {"type": "function", "function": {"name": "crm__f"}}
 [{"type": "function", "name": "f"}]}          ─▶  whose calls come back as {"namespace": "crm", "name": "f"}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Discriminator, JsonValue
from pydantic import Tag as Tagged

from deployments.api.base.errors import invalid, quoted
from deployments.api.fields.field_values import other_than
from deployments.api.fields.offered_tools import IS_GRAMMAR, NAMESPACE, OFFERED
from deployments.api.fields.strict_model import LEFT_OUT, StrictModel
from deployments.api.fields.tools import OtherTool, kind_of, tag_of

FLAT = OFFERED | {NAMESPACE}
"""Types of tools that the model is offered."""
_BETWEEN = "__"


class FlatFunction(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


_TEXT_OR_WHOLE: list[JsonValue] = [
    {"properties": {"type": {"const": "text"}}},
    {
        "required": ["syntax", "definition"],
        "properties": {"syntax": {"type": "string"}, "definition": {"type": "string"}},
    },
]


class FlatFormat(StrictModel):
    """The form of an input. A grammar is shown to the model, but not enforced."""

    model_config = ConfigDict(json_schema_extra={LEFT_OUT: IS_GRAMMAR, "anyOf": _TEXT_OR_WHOLE})

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class FlatCustomTool(StrictModel):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: FlatFormat | None = None


class OtherFlatTool(OtherTool):
    """A tool that this server would have to run, and does not offer to the model."""

    type: Annotated[str, other_than(*FLAT)]


_Single = Annotated[
    Annotated[FlatFunction, Tagged("<function>")]
    | Annotated[FlatCustomTool, Tagged("<custom>")]
    | Annotated[OtherTool, Tagged("<other>")],
    Discriminator(tag_of),
]


class ToolNamespace(StrictModel):
    """Tools whose names belong together."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[_Single]


AnyFlatTool = Annotated[
    Annotated[FlatFunction, Tagged("<function>")]
    | Annotated[FlatCustomTool, Tagged("<custom>")]
    | Annotated[ToolNamespace, Tagged("<namespace>")]
    | Annotated[OtherFlatTool, Tagged("<other>")],
    Discriminator(lambda tool: "<namespace>" if kind_of(tool) == NAMESPACE else tag_of(tool)),
]


class ClientName(NamedTuple):
    """The client's name of a tool in a namespace."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ShownTool:
    """A tool that the model is shown."""

    kind: str
    place: str
    """Where it is in the request."""
    fields: dict[str, Any]
    """The tool as chat's function or custom tool. Its name is the one that the model sees."""
    client: ClientName | None = None
    """None: the client calls it as the model does."""

    @property
    def name(self) -> str:
        """The name that the model is shown."""
        return str(self.fields["name"])

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool as chat has it."""
        return {"type": self.kind, self.kind: self.fields}

    @property
    def as_choice(self) -> dict[str, Any]:
        """A choice of this tool as chat has it."""
        return {"type": self.kind, self.kind: {"name": self.name}}


def shown_tools(tools: Sequence[AnyFlatTool]) -> list[ShownTool]:
    """Return the tools that the model sees. The description of a namespace precedes its first tool's."""
    shown = []
    for index, tool in enumerate(tools):
        place = f"tools.{index}"
        if not isinstance(tool, ToolNamespace):
            shown += _shown(tool, place)
            continue
        inside = [
            one for at, inner in enumerate(tool.tools) for one in _shown(inner, f"{place}.tools.{at}", tool.name)
        ]
        if inside and tool.description:
            fields = inside[0].fields
            fields["description"] = "\n\n".join(filter(None, (tool.description, fields.get("description"))))
        shown += inside
    return shown


def _shown(
    tool: FlatFunction | FlatCustomTool | OtherTool, place: str, namespace: str | None = None
) -> list[ShownTool]:
    if isinstance(tool, OtherTool):
        return []
    fields = tool.model_dump(exclude={"type", "format"}, exclude_none=True)
    fields["name"] = shown_name(tool.name, namespace)
    if isinstance(tool, FlatCustomTool) and tool.format is not None and tool.format.type == "grammar":
        grammar = tool.format.model_dump(exclude={"type"})
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return [ShownTool(tool.type, place, fields, None if namespace is None else ClientName(namespace, tool.name))]


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name that the model is shown of a tool."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


def chosen(choice: Any, tools: Sequence[ShownTool]) -> Any:
    """Return a `tool_choice` as chat has it. Raises `ApiError` 400 that names the field."""
    if not isinstance(choice, dict):
        return choice
    if choice["type"] != "allowed_tools":
        return _one(choice, tools, "tool_choice")
    given, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(given, list) or not given or mode not in ("auto", "required"):
        raise invalid(
            'tool_choice must have a mode ("auto" or "required") and list in tools at least one function.',
            "tool_choice",
        )
    named: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        path = f"tool_choice.tools.{index}"
        if kind_of(tool) == NAMESPACE:
            named += _all_in(_name(tool, path), tools, f"{path}.name")
        else:
            named.append(_one(tool, tools, path))
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def _all_in(namespace: str, tools: Sequence[ShownTool], path: str) -> list[dict[str, Any]]:
    found = [tool.as_choice for tool in tools if tool.client is not None and tool.client.namespace == namespace]
    if not found:
        raise invalid(f"{path} is {quoted(namespace)}, which is not a namespace in tools.", path)
    return found


def _one(choice: Any, tools: Sequence[ShownTool], path: str) -> dict[str, Any]:
    """Return the choice of one tool, which may leave out a namespace where no other tool has its name."""
    kind = kind_of(choice)
    if kind not in OFFERED:
        raise invalid(f'{path} must have the form {{"type": "function", "name": "..."}}.', path)
    name, namespace = _name(choice, path), choice.get("namespace")
    shown = shown_name(name, namespace if isinstance(namespace, str) else None)
    inside = [tool.name for tool in tools if tool.client is not None and tool.client.name == name]
    if len(inside) == 1 and shown not in (tool.name for tool in tools):
        shown = inside[0]
    return {"type": kind, kind: {"name": shown}}


def _name(given: Mapping[str, Any], path: str) -> str:
    name = given.get("name")
    if not isinstance(name, str):
        raise invalid(f"{path}.name must be a tool's name, got {quoted(name)}.", f"{path}.name")
    return name
