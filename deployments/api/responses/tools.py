"""The tools of the Responses API as those of chat: without the object around each, and some in namespaces.

{"type": "function", "name": "f"}              ─▶  {"type": "function", "function": {"name": "f"}}
{"type": "namespace", "name": "crm", "tools":      {"type": "function", "function": {"name": "crm__f"}}
 [{"type": "function", "name": "f"}]}          ─▶  whose calls come back as {"namespace": "crm", "name": "f"}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator
from pydantic import Tag as Tagged

from deployments.api.errors import invalid, quoted
from deployments.api.request.field_values import other_than
from deployments.api.request.strict_model import LenientModel, StrictModel
from deployments.api.tools.offered import NAMESPACE, OFFERED
from deployments.api.tools.protocol import OtherTool, tag_of

FLAT = OFFERED | {NAMESPACE}
"""Types of tools that the model is offered."""
_BETWEEN = "__"


class FlatFunction(LenientModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatFormat(StrictModel):
    """The form of an input. The model is told a grammar, and not held to it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class FlatCustomTool(LenientModel):
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


class ToolNamespace(LenientModel):
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
    Discriminator(lambda tool: "<namespace>" if _kind(tool) == NAMESPACE else tag_of(tool)),
]


class ClientName(NamedTuple):
    """What the client calls a tool."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request as chat has them."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where each is in the request."""
    names: dict[str, ClientName] = field(default_factory=dict)
    """What the client calls those in namespaces, by the names that the model is shown."""

    @classmethod
    def of(cls, tools: Sequence[AnyFlatTool]) -> ChatTools:
        """Return them as chat has them, without those that the model is not offered."""
        made = cls()
        for index, tool in enumerate(tools):
            if not isinstance(tool, ToolNamespace):
                made._add(tool, f"tools.{index}")
                continue
            told = tool.description
            for at, inner in enumerate(tool.tools):
                if made._add(inner, f"tools.{index}.tools.{at}", tool.name, told):
                    told = None  # the model reads it once
        return made

    def _add(
        self,
        tool: FlatFunction | FlatCustomTool | OtherTool,
        place: str,
        namespace: str | None = None,
        told: str | None = None,
    ) -> bool:
        """Add a tool, with what is told of its namespace. Return whether the model is offered it."""
        if isinstance(tool, OtherTool):
            return False
        described = "\n\n".join(filter(None, (told, tool.description))) or None
        fields = tool.model_dump(exclude={"type", "format"}, exclude_none=True) | {
            "name": shown_name(tool.name, namespace),
            "description": described,
        }
        if namespace is not None:
            self.names[fields["name"]] = ClientName(namespace, tool.name)
        if isinstance(tool, FlatCustomTool):
            fields["format"] = _nested_format(tool.format)
        self.tools.append({"type": tool.type, tool.type: fields})
        self.places.append(place)
        return True

    def choice(self, given: Any) -> Any:
        """Return a `tool_choice` as chat has it. Raises `ApiError` 400 that names the field."""
        if not isinstance(given, dict):
            return given
        if given["type"] != "allowed_tools":
            return self._one(given, "tool_choice")
        tools, mode = given.get("tools"), given.get("mode", "auto")
        if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
            raise invalid(
                'tool_choice must have a mode ("auto" or "required") and list in tools at least one function.',
                "tool_choice",
            )
        named = [one for index, tool in enumerate(tools) for one in self._some(tool, f"tool_choice.tools.{index}")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    def _some(self, given: Any, path: str) -> Iterator[dict[str, Any]]:
        """Yield the tools that an entry of allowed tools names: one, or all of a namespace."""
        if _kind(given) != NAMESPACE:
            yield self._one(given, path)
            return
        found = [tool for tool in self.tools if self._namespace(tool) == _name(given, path)]
        if not found:
            raise invalid(
                f"{path}.name is {quoted(given['name'])}, which is not a namespace in tools.", f"{path}.name"
            )
        for tool in found:
            yield {"type": tool["type"], tool["type"]: {"name": tool[tool["type"]]["name"]}}

    def _one(self, given: Any, path: str) -> dict[str, Any]:
        kind = _kind(given)
        if kind not in OFFERED:
            raise invalid(f'{path} must have the form {{"type": "function", "name": "..."}}.', path)
        name, namespace = _name(given, path), given.get("namespace")
        inside = [shown for shown, client in self.names.items() if client.name == name]
        shown = shown_name(name, namespace if isinstance(namespace, str) else None)
        is_known = any(tool[tool["type"]]["name"] == shown for tool in self.tools)
        return {"type": kind, kind: {"name": shown if is_known or len(inside) != 1 else inside[0]}}

    def _namespace(self, tool: Mapping[str, Any]) -> str | None:
        client = self.names.get(tool[tool["type"]]["name"])
        return None if client is None else client.namespace


def shown_name(name: str, namespace: str | None) -> str:
    """Return the name that the model is shown of a tool."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith(_BETWEEN) else f"{namespace}{_BETWEEN}{name}"


def _kind(tool: object) -> object:
    return tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)


def _name(given: Mapping[str, Any], path: str) -> str:
    name = given.get("name")
    if not isinstance(name, str):
        raise invalid(f"{path}.name must be a tool's name, got {quoted(name)}.", f"{path}.name")
    return name


def _nested_format(form: FlatFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "grammar":
        return None
    return {"type": "grammar", "grammar": {"syntax": form.syntax, "definition": form.definition}}
