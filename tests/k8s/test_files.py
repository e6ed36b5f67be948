"""Files of k8s/ that are generated from others, and what the README and Ray must agree with."""

from __future__ import annotations

import json
import re
import runpy

import pytest
import yaml
from ray._private import ray_constants

from tests.k8s.support.manifests import ADDITIONS, DEPLOYMENTS, K8S, ROOT, build, kustomize_command
from tests.k8s.support.operation_checks import DRAIN
from tests.k8s.support.wiring_checks import described_secrets

LARGEST_APPLIED = 256 * 1024
"""Largest object, in bytes, that `kubectl apply` can record in an annotation."""


def test_the_prometheus_rule_is_fresh() -> None:
    made = runpy.run_path(str(K8S / "generate.py"))
    source = made["RULES"].read_text(encoding="utf-8")
    there = made["TARGET"].read_text(encoding="utf-8")
    assert there == made["prometheus_rule"](source), "run: python k8s/generate.py"
    assert yaml.safe_load(there)["spec"] == yaml.safe_load(source)


@pytest.mark.skipif(kustomize_command() is None, reason="neither kubectl nor kustomize is installed")
def test_every_dashboard_is_a_config_map_that_grafana_finds() -> None:
    files = {path.name: path for path in (ROOT / "monitoring" / "dashboards" / "json").glob("*.json")}
    found: dict[str, str] = {}
    for doc in build("overlays/monitoring").of("ConfigMap"):
        assert doc["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert doc["metadata"]["namespace"] == "monitoring"
        found |= doc["data"]
        assert len(json.dumps(doc)) < LARGEST_APPLIED
    assert {name: json.loads(text) for name, text in found.items()} == {
        name: json.loads(path.read_text(encoding="utf-8")) for name, path in files.items()
    }


def test_the_readme_names_every_build_and_every_secret() -> None:
    text = (K8S / "README.md").read_text(encoding="utf-8")
    for directory in (*DEPLOYMENTS, *ADDITIONS):
        assert directory in text
    assert described_secrets() == {"raydix-redis", "raydix-access", "raydix-hub", "raydix-admin"}


def test_no_secret_is_kept_here() -> None:
    for path in K8S.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"^kind: Secret$|hf_[A-Za-z0-9]{20}|secretGenerator", text, re.M), path


def test_ray_still_drains_on_sigterm_for_as_long_as_it_is_set_to() -> None:
    """Ray reads the variable that the pods set; a new version of Ray may rename it."""
    assert hasattr(ray_constants, DRAIN)
