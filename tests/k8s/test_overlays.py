"""Everything under k8s/, built and checked without a cluster."""

from __future__ import annotations

import pytest

from tests.k8s.support import crd, operation_checks, schema_checks, wiring_checks
from tests.k8s.support.checks import CHECKS
from tests.k8s.support.manifests import ADDITIONS, DEPLOYMENTS, build, kustomize_command

MODULES = (schema_checks, wiring_checks, operation_checks)  # importing them registers their checks

pytestmark = pytest.mark.skipif(kustomize_command() is None, reason="neither kubectl nor kustomize is installed")


@pytest.mark.parametrize("directory", [*DEPLOYMENTS, *ADDITIONS])
@pytest.mark.parametrize("name", CHECKS)
def test_each_check_holds_for_each_directory(directory: str, name: str) -> None:
    if name == "rayservice_schema" and not crd.RAYSERVICE_CRD.exists():
        pytest.skip(f"KubeRay's definition is not beside this checkout ({crd.RAYSERVICE_CRD})")
    if name == "rules" and schema_checks.promtool() is None:
        pytest.skip("promtool is not installed")
    assert list(CHECKS[name](build(directory))) == []


def test_apply_k_on_k8s_is_the_gpu_overlay() -> None:
    assert build(".").docs == build("overlays/gpu").docs
