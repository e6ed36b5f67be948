"""Checks a custom resource against its definition, as an API server with strict field validation does.

The definition's CEL rules (`x-kubernetes-validations`) are not checked: JSON Schema cannot express them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

from tests.k8s.support.manifests import ROOT, Doc

_FILE = Path("shared", "k8s", "ray.io_rayservices.yaml")
_FOUND = [parent / _FILE for parent in ROOT.parents if (parent / _FILE).exists()]
RAYSERVICE_CRD = _FOUND[0] if _FOUND else ROOT.parent / _FILE
"""KubeRay 1.7.0's definition, if it lies beside the checkout or beside one of its parent folders."""
_OPEN = "x-kubernetes-preserve-unknown-fields"


@cache
def schema(path: Path, version: str) -> Doc:
    """The schema of one version in a definition, which allows no field that it does not name."""
    definition = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    (found,) = [v for v in definition["spec"]["versions"] if v["name"] == version]
    strict: Doc = _strict(found["schema"]["openAPIV3Schema"])
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def problems(doc: Doc, path: Path) -> Iterator[str]:
    """Yield the errors for which an API server would refuse `doc`."""
    strict = schema(path, doc["apiVersion"].rsplit("/", 1)[-1])
    filled = _with_defaults(doc, strict)
    for error in Draft7Validator(strict).iter_errors(filled):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"


def _strict(schema: Doc) -> Doc:
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {name: _strict(sub) for name, sub in schema["properties"].items()}
        if not schema.get(_OPEN):
            made["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            made[key] = _strict(schema[key])
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    return made


def _with_defaults(value: Any, schema: Any) -> Any:
    """`value` with the defaults that an API server fills in before it validates."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        filled = {key: sub["default"] for key, sub in properties.items() if "default" in sub} | value
        extra = schema.get("additionalProperties")
        extra = extra if isinstance(extra, dict) else {}
        return {key: _with_defaults(item, properties.get(key, extra)) for key, item in filled.items()}
    if isinstance(value, list):
        return [_with_defaults(item, schema.get("items", {})) for item in value]
    return value
