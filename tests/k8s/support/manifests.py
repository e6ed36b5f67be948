"""Builds a directory with `kubectl kustomize` and finds the pods that KubeRay and Kubernetes would make of it."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Doc = dict[str, Any]
ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "k8s"

DEPLOYMENTS = (
    "overlays/cpu-dev",
    "overlays/gpu",
    "examples/llama-3.1-8b",
    "examples/qwen3-32b",
    "examples/deepseek-v3",
)
"""Directories that are each a whole deployment."""
ADDITIONS = ("overlays/monitoring", "overlays/inference-gateway")
"""Directories that are applied beside a deployment; here, beside overlays/gpu."""


@dataclass(frozen=True)
class Pod:
    """A pod template, and its name in messages."""

    name: str
    labels: dict[str, str]
    spec: Doc
    group: Doc
    """The RayService group that the pod belongs to; {} for other pods."""

    @property
    def containers(self) -> list[Doc]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {port["name"]: port["containerPort"] for c in self.containers for port in c.get("ports", [])}

    def matches(self, selector: Doc) -> bool:
        """Whether a label selector selects the pod. Selectors with expressions are not supported."""
        assert selector.keys() <= {"matchLabels"}, f"selector not understood: {selector}"
        wanted: dict[str, str] = selector.get("matchLabels", {})
        return wanted.items() <= self.labels.items()


@dataclass(frozen=True)
class Manifests:
    """All objects that are applied together."""

    docs: list[Doc]

    def of(self, *kinds: str) -> list[Doc]:
        return [doc for doc in self.docs if doc["kind"] in kinds]

    def one(self, kind: str, name: str | None = None) -> Doc:
        (found,) = [doc for doc in self.of(kind) if name in (None, doc["metadata"]["name"])]
        return found

    @property
    def cluster(self) -> Doc:
        found: Doc = self.one("RayService")["spec"]["rayClusterConfig"]
        return found

    @property
    def serve(self) -> Doc:
        """The parsed serveConfigV2."""
        parsed: Doc = yaml.safe_load(self.one("RayService")["spec"]["serveConfigV2"])
        return parsed

    @property
    def args(self) -> Doc:
        """Raydix's own arguments."""
        found: Doc = self.serve["applications"][0]["args"]
        return found

    @property
    def head(self) -> Pod:
        group = self.cluster["headGroupSpec"]
        return Pod("head", group["template"]["metadata"]["labels"], group["template"]["spec"], group)

    @property
    def workers(self) -> list[Pod]:
        groups = self.cluster["workerGroupSpecs"]
        return [Pod(g["groupName"], g["template"]["metadata"]["labels"], g["template"]["spec"], g) for g in groups]

    @property
    def pods(self) -> list[Pod]:
        """All pod templates."""
        return [self.head, *self.workers, *self._other_pods()]

    def _other_pods(self) -> Iterator[Pod]:
        for doc in self.of("StatefulSet", "Deployment", "Job"):
            template = doc["spec"]["template"]
            labels = template.get("metadata", {}).get("labels", {})
            yield Pod(doc["metadata"]["name"], labels, template["spec"], {})

    def copy(self) -> Manifests:
        return Manifests(copy.deepcopy(self.docs))


def kustomize_command() -> list[str] | None:
    """The command that builds a directory; None where neither kubectl nor kustomize is installed."""
    if path := shutil.which("kubectl"):
        return [path, "kustomize"]
    if path := shutil.which("kustomize"):
        return [path, "build"]
    return None


@cache
def _build(directory: str) -> tuple[Doc, ...]:
    command = kustomize_command()
    assert command is not None
    made = subprocess.run([*command, str(K8S / directory)], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return tuple(yaml.load_all(made.stdout, Loader=yaml.CSafeLoader))


def build(directory: str) -> Manifests:
    """Build a directory of k8s/; an addition is built together with overlays/gpu."""
    docs = _build(directory) if directory not in ADDITIONS else (*_build("overlays/gpu"), *_build(directory))
    return Manifests(list(docs)).copy()
