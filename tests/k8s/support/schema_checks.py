"""Checks against the schemas of Kubernetes, KubeRay, Ray Serve, Raydix and Prometheus."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pydantic import ValidationError

from deployments.config.args import AppArgs
from deployments.config.serve_schema import read_serve_config
from tests.k8s.support import crd
from tests.k8s.support.checks import check
from tests.k8s.support.manifests import Manifests

KUBERNETES = "1.34"
CUSTOM = {
    "RayService": "ray.io/v1",
    "ScrapeConfig": "monitoring.coreos.com/v1alpha1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}
"""Kinds that are not built into Kubernetes, and the version that k8s/ uses."""
FIELDS = {
    "ScrapeConfig": "jobName metricsPath scrapeInterval scrapeTimeout staticConfigs.targets "
    "authorization.credentials.name authorization.credentials.key",
    "PodMonitor": "selector.matchLabels.* podTargetLabels podMetricsEndpoints.port podMetricsEndpoints.interval",
    "PrometheusRule": "groups.name groups.interval groups.rules.record groups.rules.alert groups.rules.expr "
    "groups.rules.for groups.rules.keep_firing_for groups.rules.labels.* groups.rules.annotations.*",
    "InferencePool": "selector.matchLabels.* targetPorts.number endpointPickerRef.name "
    "endpointPickerRef.port.number endpointPickerRef.failureMode",
    "HTTPRoute": "parentRefs.name parentRefs.namespace rules.matches.path.type rules.matches.path.value "
    "rules.backendRefs.group rules.backendRefs.kind rules.backendRefs.name rules.timeouts.request",
}
"""Fields of specs that were checked by hand against the definitions of prometheus-operator 0.93.0, the Gateway
API's inference extension 1.6.0 and the Gateway API 1.3.0, which are too large to keep here. Look a new field up
there before you add it."""


@check
def built_in_kinds(manifests: Manifests) -> Iterator[str]:
    """Objects satisfy Kubernetes' own schemas, strictly; every other kind is one of `CUSTOM`."""
    for doc in manifests.docs:
        if CUSTOM.get(doc["kind"]) == doc["apiVersion"]:
            continue
        try:
            kubernetes_validate.validate(doc, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.absolute_path))
            yield f"{doc['kind']} {doc['metadata']['name']}: {where}: {error.message[:300]}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{doc['kind']} of {doc['apiVersion']}: {error.message}"


@check
def custom_fields(manifests: Manifests) -> Iterator[str]:
    """Custom resources have only fields that were looked up in their definitions."""
    for doc in manifests.of(*FIELDS):
        known = FIELDS[doc["kind"]].split()
        free = tuple(path.removesuffix("*") for path in known if path.endswith("*"))
        for path in sorted(set(_paths(doc["spec"])) - set(known)):
            if not path.startswith(free):
                yield f"{doc['kind']} {doc['metadata']['name']}: spec.{path} was never looked up"


def _paths(value: Any, before: str = "") -> Iterator[str]:
    """Dotted names of all leaves, without positions in lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, f"{before}.{key}" if before else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _paths(item, before)
    else:
        yield before


@check
def rayservice_schema(manifests: Manifests) -> Iterator[str]:
    """The RayService satisfies KubeRay's definition, where that is available."""
    if crd.RAYSERVICE_CRD.exists():
        yield from crd.problems(manifests.one("RayService"), crd.RAYSERVICE_CRD)


@check
def serve_config(manifests: Manifests) -> Iterator[str]:
    """serve.yaml satisfies Ray Serve's schema and Raydix's, and overrides only deployments that exist."""
    try:
        config = read_serve_config(manifests.serve)
    except ValidationError as error:
        yield from _first(error)
        return
    except ValueError as error:
        yield str(error)
        return
    for application in config.applications:
        module, _, name = application.import_path.partition(":")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            yield f"import_path {application.import_path}: {error}"
            continue
        try:
            args = AppArgs.model_validate(application.args)
        except ValidationError as error:
            yield from _first(error)
            continue
        known = {"MetricsHub", "Ingress", *args.pools}
        for deployment in application.deployments:
            if deployment.name not in known:
                yield f"no deployment {deployment.name}; there are {sorted(known)}"


@check
def gateway_metrics(manifests: Manifests) -> Iterator[str]:
    """The gauges that an InferencePool's picker reads are switched on."""
    if manifests.of("InferencePool") and not app_args(manifests).metrics.inference_gateway:
        yield "there is an InferencePool, and metrics.inference_gateway is off"


@check
def rules(manifests: Manifests) -> Iterator[str]:
    """promtool accepts the rules, where it is installed."""
    command = promtool()
    for doc in manifests.of("PrometheusRule") if command else []:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "rules.yaml")
            path.write_text(yaml.safe_dump(doc["spec"]), encoding="utf-8")
            ran = subprocess.run([str(command), "check", "rules", str(path)], capture_output=True, text=True)
            if ran.returncode != 0:
                yield f"{doc['metadata']['name']}: {ran.stderr}"


def promtool() -> str | None:
    """The path of Prometheus' own checker; None where it is not installed."""
    return shutil.which("promtool")


def app_args(manifests: Manifests) -> AppArgs:
    """Raydix's arguments, parsed as Raydix does."""
    return AppArgs.model_validate(manifests.args)


def _first(error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        yield f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
