"""Seeded mistakes: each is made alone, and the check that is meant to find it must find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.k8s.support import crd, operation_checks, schema_checks, wiring_checks
from tests.k8s.support.checks import CHECKS
from tests.k8s.support.manifests import Doc, Manifests, build, kustomize_command

MODULES = (schema_checks, wiring_checks, operation_checks)  # importing them registers their checks

pytestmark = pytest.mark.skipif(kustomize_command() is None, reason="neither kubectl nor kustomize is installed")


@dataclass(frozen=True)
class Mistake:
    """One mistake, the build it is made in, and the check that has to report it."""

    what: str
    found_by: str
    make: Callable[[Manifests], Any]
    directory: str = "overlays/gpu"
    says: str = ""
    """Part of the check's message."""


def rename(doc: Doc, old: str, new: str) -> None:
    doc[new] = doc.pop(old)


def container(manifests: Manifests, group: int) -> Doc:
    found: Doc = manifests.cluster["workerGroupSpecs"][group]["template"]["spec"]["containers"][0]
    return found


def group(manifests: Manifests, index: int) -> Doc:
    found: Doc = manifests.cluster["workerGroupSpecs"][index]
    return found


def pod(manifests: Manifests, index: int) -> Doc:
    found: Doc = group(manifests, index)["template"]["spec"]
    return found


def spec(manifests: Manifests, kind: str, name: str | None = None) -> Doc:
    found: Doc = manifests.one(kind, name)["spec"]
    return found


def serve(change: Callable[[Doc], Any]) -> Callable[[Manifests], None]:
    """Make a change to serve.yaml."""

    def make(manifests: Manifests) -> None:
        config = manifests.serve
        change(config)
        manifests.one("RayService")["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    return make


def args(change: Callable[[Doc], Any]) -> Callable[[Manifests], None]:
    """Make a change to Raydix's own arguments."""
    return serve(lambda config: change(config["applications"][0]["args"]))


INGRESS, ENGINE = 0, 1
MONITORING, GATEWAY, LLAMA = "overlays/monitoring", "overlays/inference-gateway", "examples/llama-3.1-8b"
CPUS, DEEPSEEK = "overlays/cpu-dev", "examples/deepseek-v3"

MISTAKES = [
    # A misspelt field of each kind.
    Mistake(
        "rayStartParms", "rayservice_schema", lambda m: rename(group(m, 1), "rayStartParams", "rayStartParms")
    ),
    Mistake(
        "a container's port misspelt", "rayservice_schema", lambda m: rename(container(m, 0), "ports", "prots")
    ),
    Mistake(
        "minAvailabe",
        "built_in_kinds",
        lambda m: rename(spec(m, "PodDisruptionBudget", "raydix-engine"), "minAvailable", "minAvailabe"),
    ),
    Mistake(
        "podSelectors",
        "built_in_kinds",
        lambda m: rename(spec(m, "NetworkPolicy", "raydix-head"), "podSelector", "podSelectors"),
    ),
    Mistake("clusterIp", "built_in_kinds", lambda m: rename(spec(m, "Service"), "clusterIP", "clusterIp")),
    Mistake("serviceNmae", "built_in_kinds", lambda m: spec(m, "StatefulSet").update(serviceNmae="x")),
    Mistake("backofLimit", "built_in_kinds", lambda m: spec(m, "Job").update(backofLimit=1), LLAMA),
    Mistake(
        "accessMode",
        "built_in_kinds",
        lambda m: rename(spec(m, "PersistentVolumeClaim"), "accessModes", "accessMode"),
        LLAMA,
    ),
    Mistake(
        "scrapeIntervall",
        "custom_fields",
        lambda m: spec(m, "ScrapeConfig").update(scrapeIntervall="1s"),
        MONITORING,
    ),
    Mistake(
        "podMetricsEndpoint",
        "custom_fields",
        lambda m: spec(m, "PodMonitor").update(podMetricsEndpoint=[]),
        MONITORING,
    ),
    Mistake(
        "exprs",
        "custom_fields",
        lambda m: spec(m, "PrometheusRule")["groups"][0]["rules"][0].update(exprs="1"),
        MONITORING,
    ),
    Mistake("targetPort", "custom_fields", lambda m: spec(m, "InferencePool").update(targetPort=1), GATEWAY),
    Mistake(
        "a kind of another version",
        "built_in_kinds",
        lambda m: m.one("RayService").update(apiVersion="ray.io/v1alpha1"),
        says="RayService",
    ),
    # Mistakes that a schema finds.
    Mistake("a group without a name", "rayservice_schema", lambda m: group(m, 1).pop("groupName")),
    Mistake("a number as text", "rayservice_schema", lambda m: group(m, 1).update(maxReplicas="4")),
    Mistake(
        "an unknown authentication", "rayservice_schema", lambda m: m.cluster["authOptions"].update(mode="key")
    ),
    # serve.yaml.
    Mistake("a misspelt argument", "serve_config", args(lambda a: a.update(enigne={})), says="enigne"),
    Mistake(
        "a misspelt engine setting", "serve_config", args(lambda a: a["engine"].update(kv_page=1)), says="kv_page"
    ),
    Mistake(
        "a setting that does not exist",
        "serve_config",
        args(lambda a: a["engine"].update(context_parallel_size=2)),
        "examples/qwen3-32b",
        says="context_parallel_size",
    ),
    Mistake(
        "a wrong import_path",
        "serve_config",
        serve(lambda c: c["applications"][0].update(import_path="deployments.app:built")),
        says="built",
    ),
    Mistake(
        "a misspelt option of Serve", "serve_config", serve(lambda c: c.update(http_option={})), says="http_option"
    ),
    Mistake(
        "an override of nothing",
        "serve_config",
        serve(lambda c: c["applications"][0]["deployments"][0].update(name="MetricHub")),
        says="MetricHub",
    ),
    Mistake("ingresses on loopback", "serving_port", args(lambda a: a["ingresses"].update(host="127.0.0.1"))),
    Mistake("ingresses on another port", "serving_port", args(lambda a: a["ingresses"].update(port=8001))),
    Mistake("a proxy on the port", "serving_port", serve(lambda c: c.pop("proxy_location"))),
    Mistake("no gauges for the picker", "gateway_metrics", args(lambda a: a.pop("metrics")), GATEWAY),
    # Labels, ports, names.
    Mistake(
        "a label that the budget does not know",
        "selectors",
        lambda m: spec(m, "PodDisruptionBudget", "raydix-engine")["selector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "engines"}
        ),
    ),
    Mistake(
        "a peer that is not there",
        "selectors",
        lambda m: spec(m, "NetworkPolicy", "raydix-redis")["ingress"][0]["from"][0]["podSelector"].update(
            matchLabels={"app.kubernetes.io/component": "haed"}
        ),
    ),
    Mistake(
        "a pool of other pods",
        "selectors",
        lambda m: spec(m, "InferencePool")["selector"].update(matchLabels={"app": "raydix"}),
        GATEWAY,
    ),
    Mistake(
        "a Service for a port that is not there",
        "ports",
        lambda m: spec(m, "Service")["ports"][0].update(targetPort="rdeis"),
    ),
    Mistake(
        "a monitored port that is not there",
        "ports",
        lambda m: spec(m, "PodMonitor")["podMetricsEndpoints"][0].update(port="metric"),
        MONITORING,
    ),
    Mistake(
        "a policy for a port that is not there",
        "ports",
        lambda m: spec(m, "NetworkPolicy", "raydix-clients")["ingress"][0]["ports"][0].update(port="http"),
    ),
    Mistake(
        "clients led to engine pods",
        "serving_port",
        lambda m: container(m, ENGINE)["ports"].append({"name": "serve", "containerPort": 8000}),
    ),
    Mistake(
        "a scrape of a Service that is not there",
        "scrape",
        lambda m: spec(m, "ScrapeConfig")["staticConfigs"][0].update(targets=["raydix-svc.raydix.svc:8000"]),
        MONITORING,
    ),
    Mistake(
        "a wire that the policy stops", "cluster_ports", args(lambda a: a["wire"].update(ports=[20000, 20199]))
    ),
    Mistake("a wire on any port", "cluster_ports", args(lambda a: a.pop("wire"))),
    Mistake(
        "a port of Ray left to chance",
        "cluster_ports",
        lambda m: group(m, ENGINE)["rayStartParams"].pop("node-manager-port"),
    ),
    Mistake(
        "a port open for nothing",
        "cluster_ports",
        lambda m: spec(m, "NetworkPolicy", "raydix-cluster")["ingress"][0]["ports"].append({"port": 22}),
    ),
    Mistake(
        "a Secret that nothing creates",
        "references",
        lambda m: m.cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"].update(
            name="x"
        ),
    ),
    Mistake(
        "a volume claim that nothing creates",
        "references",
        lambda m: m.docs.remove(m.one("PersistentVolumeClaim")),
        LLAMA,
    ),
    Mistake("a mount without its volume", "references", lambda m: pod(m, ENGINE)["volumes"].clear()),
    # Draining.
    Mistake(
        "a grace period shorter than the drain",
        "time_to_drain",
        lambda m: pod(m, ENGINE).update(terminationGracePeriodSeconds=60),
        says="outlast it (60 s)",
    ),
    Mistake(
        "streams longer than the drain",
        "time_to_drain",
        args(lambda a: a.pop("limits")),
        says="request_timeout_s",
    ),
    Mistake("Serve's default shutdown", "time_to_drain", args(lambda a: a["engines"].pop("drain_timeout_s"))),
    Mistake(
        "an old cluster deleted under its streams",
        "time_to_drain",
        lambda m: spec(m, "RayService").update(rayClusterDeletionDelaySeconds=60),
    ),
    Mistake("no preStop hook", "time_to_drain", lambda m: container(m, INGRESS).pop("lifecycle"), says="preStop"),
    Mistake(
        "Ray's default drain", "time_to_drain", lambda m: container(m, ENGINE).pop("env"), says="drain_timeout_s"
    ),
    Mistake(
        "a notice that the engine does not look for",
        "notices",
        args(lambda a: a["drain"].update(notice="/tmp/notice")),
        says="/tmp/notice",
    ),
    Mistake(
        "no notice",
        "notices",
        lambda m: container(m, ENGINE).update(lifecycle={"preStop": {"sleep": {"seconds": 5}}}),
    ),
    Mistake(
        "a notice that promises more than the pod's time",
        "notices",
        args(lambda a: a["drain"].update(grace_s=3600)),
        CPUS,
        says="3600",
    ),
    Mistake("no readiness probe", "probes", lambda m: container(m, ENGINE).pop("readinessProbe")),
    Mistake("no probe of the ingress", "probes", lambda m: container(m, INGRESS).pop("readinessProbe")),
    Mistake(
        "an ingress gone before the Service notices",
        "probes",
        args(lambda a: a["ingresses"].pop("shutdown_delay_s")),
        says="shutdown_delay_s",
    ),
    Mistake(
        "another pod's probe",
        "probes",
        lambda m: container(m, ENGINE).update(readinessProbe=container(m, INGRESS)["readinessProbe"]),
    ),
    Mistake(
        "a probe that is no command",
        "probes",
        lambda m: container(m, ENGINE)["readinessProbe"]["exec"]["command"].__setitem__(-1, "engines"),
    ),
    Mistake("marks elsewhere", "probes", args(lambda a: a["health"].update(beat_directory="/tmp/beats"))),
    Mistake(
        "a budget that blocks every drain",
        "disruption",
        lambda m: spec(m, "PodDisruptionBudget", "raydix-engine").update(minAvailable=2),
    ),
    Mistake(
        "a budget on a single pod",
        "disruption",
        lambda m: m.docs.append(build("overlays/gpu").one("PodDisruptionBudget", "raydix-ingress")),
        CPUS,
    ),
    Mistake(
        "a budget that Kubernetes cannot count",
        "disruption",
        lambda m: rename(spec(m, "PodDisruptionBudget", "raydix-engine"), "minAvailable", "maxUnavailable"),
    ),
    Mistake("a stage without a pod", "stages", lambda m: group(m, ENGINE).pop("numOfHosts"), DEEPSEEK),
    Mistake(
        "ranks that cannot connect",
        "stages",
        lambda m: m.docs.remove(m.one("NetworkPolicy", "raydix-ranks")),
        DEEPSEEK,
    ),
    Mistake(
        "ranks that everybody reaches",
        "stages",
        lambda m: spec(m, "NetworkPolicy", "raydix-ranks")["ingress"][0]["from"][0]["podSelector"].pop(
            "matchLabels"
        ),
        DEEPSEEK,
    ),
    Mistake(
        "no pods for a second replica", "capacity", lambda m: group(m, ENGINE).update(maxReplicas=2), DEEPSEEK
    ),
    Mistake("no budget", "disruption", lambda m: m.docs.remove(m.one("PodDisruptionBudget", "raydix-ingress"))),
    # Sizes.
    Mistake("more replicas than pods", "capacity", args(lambda a: a["engines"].update(autoscaling={"max": 9}))),
    Mistake(
        "no room for a pod that replaces another", "capacity", lambda m: group(m, ENGINE).update(maxReplicas=4)
    ),
    Mistake("a replica larger than its pod", "capacity", args(lambda a: a["engines"].update(num_cpus=64))),
    Mistake(
        "a hub that may run on the head",
        "capacity",
        serve(lambda c: c["applications"][0].pop("deployments")),
        says="MetricsHub",
    ),
    Mistake(
        "an ingress that may take an engine's place", "capacity", args(lambda a: a["ingresses"].pop("resources"))
    ),
    Mistake(
        "limits above requests",
        "resources",
        lambda m: container(m, ENGINE)["resources"]["limits"].update(memory="64Gi"),
    ),
    Mistake("a container without a size", "resources", lambda m: container(m, INGRESS).pop("resources")),
    Mistake(
        "an object store that takes the memory",
        "resources",
        lambda m: group(m, ENGINE)["rayStartParams"].update({"object-store-memory": "20000000000"}),
    ),
    Mistake("no toleration", "gpus", lambda m: pod(m, ENGINE).pop("tolerations")),
    Mistake("an engine on CPUs that takes a GPU", "gpus", args(lambda a: a["engine"].update(device="cpu"))),
    Mistake(
        "an unpinned image", "images", lambda m: container(m, ENGINE).update(image="registry.example.com/raydix")
    ),
    Mistake("the latest image", "images", lambda m: container(m, ENGINE).update(image="raydix:latest")),
    # Rights.
    Mistake("root", "rights", lambda m: pod(m, ENGINE)["securityContext"].update(runAsUser=0)),
    Mistake(
        "a writable root",
        "rights",
        lambda m: container(m, INGRESS)["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    Mistake("nowhere to write", "rights", lambda m: container(m, ENGINE)["volumeMounts"].clear()),
    Mistake("a token of Kubernetes", "rights", lambda m: pod(m, ENGINE).pop("automountServiceAccountToken")),
    Mistake(
        "an autoscaler with capabilities",
        "rights",
        lambda m: m.cluster["autoscalerOptions"]["securityContext"].pop("capabilities"),
    ),
    Mistake("a service open to everybody", "keys", args(lambda a: a.pop("access_file"))),
    Mistake("keys that are not mounted", "keys", args(lambda a: a.update(access_file="/etc/keys/access.yaml"))),
    Mistake(
        "no default deny",
        "denied_by_default",
        lambda m: spec(m, "NetworkPolicy", "raydix-deny").update(policyTypes=["Ingress"]),
    ),
    Mistake(
        "a head that runs replicas",
        "cluster",
        lambda m: m.cluster["headGroupSpec"]["rayStartParams"].pop("num-cpus"),
    ),
    Mistake("a head that serves", "cluster", lambda m: spec(m, "RayService").pop("excludeHeadPodFromServeSvc")),
    Mistake("Ray open to all", "cluster", lambda m: m.cluster.pop("authOptions"), says="token"),
    Mistake("another Ray", "cluster", lambda m: m.cluster.update(rayVersion="2.59.0")),
    Mistake(
        "a rule that is no PromQL",
        "rules",
        lambda m: spec(m, "PrometheusRule")["groups"][0]["rules"][0].update(expr="rate(raydix"),
        MONITORING,
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.what}: {mistake.found_by}")
def test_each_mistake_is_found(mistake: Mistake) -> None:
    if mistake.found_by == "rayservice_schema" and not crd.RAYSERVICE_CRD.exists():
        pytest.skip(f"KubeRay's definition is not beside this checkout ({crd.RAYSERVICE_CRD})")
    if mistake.found_by == "rules" and schema_checks.promtool() is None:
        pytest.skip("promtool is not installed")
    manifests = build(mistake.directory)
    mistake.make(manifests)
    found = list(CHECKS[mistake.found_by](manifests))
    assert found, "not found"
    assert mistake.says in " ".join(found)


def test_every_check_has_a_mistake_to_find() -> None:
    assert CHECKS.keys() == {mistake.found_by for mistake in MISTAKES}
