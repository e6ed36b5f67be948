"""The deployments of an application as Serve would deploy them. Serve keeps them private elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from ray.serve import Application
from ray.serve._private.build_app import build_app
from ray.serve._private.config import DeploymentConfig, ReplicaConfig


class Bound(NamedTuple):
    """Everything that Serve is told about one deployment."""

    config: DeploymentConfig
    replica_config: ReplicaConfig


def deployments_of(application: Application) -> dict[str, Bound]:
    """Return the deployments of an application by name; the arguments have handles in place of applications."""
    built = build_app(application, name="llm").deployments
    return {each.name: Bound(each._deployment_config, each._replica_config) for each in built}
