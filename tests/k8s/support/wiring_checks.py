"""Checks of labels, ports and names that refer to other objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.k8s.support.checks import check
from tests.k8s.support.manifests import K8S, Doc, Manifests, Pod
from tests.k8s.support.schema_checks import app_args

FOREIGN_PODS = {"inferencepool": "raydix-epp"}
"""Labels of pods that another chart installs."""
FOREIGN_CONFIG_MAPS = {"kube-root-ca.crt"}
"""ConfigMaps that Kubernetes itself creates."""
RAY_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
)


@check
def selectors(manifests: Manifests) -> Iterator[str]:
    """Every selector selects some pod of Raydix."""
    for where, selector in _selectors(manifests):
        if selector.get("matchLabels") == FOREIGN_PODS:
            continue
        if not any(pod.matches(selector) for pod in manifests.pods):
            yield f"{where}: no pod has {selector}"


def _selectors(manifests: Manifests) -> Iterator[tuple[str, Doc]]:
    for doc in manifests.docs:
        kind, name, spec = doc["kind"], doc["metadata"]["name"], doc.get("spec", {})
        if kind == "Service":
            yield f"Service {name}", {"matchLabels": spec["selector"]}
        elif kind in ("PodDisruptionBudget", "InferencePool", "PodMonitor", "StatefulSet"):
            yield f"{kind} {name}", spec["selector"]
        elif kind == "NetworkPolicy":
            yield f"NetworkPolicy {name}", spec["podSelector"]
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        yield f"a peer of NetworkPolicy {name}", peer["podSelector"]
    for pod in manifests.pods:
        for spread in pod.spec.get("topologySpreadConstraints", []):
            yield f"topologySpreadConstraints of {pod.name}", spread["labelSelector"]


@check
def ports(manifests: Manifests) -> Iterator[str]:
    """Every port that is referred to by name exists in the pods."""
    for doc in manifests.of("NetworkPolicy"):
        selected = [pod for pod in manifests.pods if pod.matches(doc["spec"]["podSelector"])]
        for rule in doc["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if isinstance(port["port"], str) and not any(port["port"] in pod.ports for pod in selected):
                    yield f"NetworkPolicy {doc['metadata']['name']}: no pod has a port named {port['port']}"
    for doc in manifests.of("Service"):
        pods = [pod for pod in manifests.pods if pod.matches({"matchLabels": doc["spec"]["selector"]})]
        for port in doc["spec"]["ports"]:
            if not all(port["targetPort"] in pod.ports for pod in pods):
                yield f"Service {doc['metadata']['name']}: its pods have no port named {port['targetPort']}"
    for doc in manifests.of("PodMonitor"):
        pods = [pod for pod in manifests.pods if pod.matches(doc["spec"]["selector"])]
        for endpoint in doc["spec"]["podMetricsEndpoints"]:
            if not any(endpoint["port"] in pod.ports for pod in pods):
                yield f"PodMonitor {doc['metadata']['name']}: no pod has a port named {endpoint['port']}"


@check
def serving_port(manifests: Manifests) -> Iterator[str]:
    """Ingresses listen on the port that others use, and the Service leads to ingress pods alone."""
    ingresses = app_args(manifests).ingresses
    if ingresses.http != "direct" or manifests.serve.get("proxy_location") != "Disabled":
        yield "Serve's proxy takes part: pods are probed, and clients connect, at the ingresses"
    (port,) = manifests.one("RayService")["spec"]["serveService"]["spec"]["ports"]
    if ingresses.host != "0.0.0.0":
        yield f"ingresses listen on {ingresses.host}: nothing outside the pod can reach them"
    having = [pod.name for pod in manifests.workers if port["targetPort"] in pod.ports]
    if having != ["ingress"]:
        yield f"the Service's port {port['targetPort']} is one of {having}, not of ingress pods alone"
    looked = [("the Service", port["port"])]
    looked += [(f"{pod.name} pods", pod.ports["serve"]) for pod in manifests.workers if "serve" in pod.ports]
    for pool in manifests.of("InferencePool"):
        looked += [("InferencePool", target["number"]) for target in pool["spec"]["targetPorts"]]
    looked += [(f"a scrape of {host}", number) for host, number in _scraped(manifests)]
    for what, number in looked:
        if number != ingresses.port:
            yield f"{what}: port {number}, but ingresses listen on {ingresses.port}"


@check
def scrape(manifests: Manifests) -> Iterator[str]:
    """Prometheus scrapes one target, the Service that KubeRay creates."""
    meta = manifests.one("RayService")["metadata"]
    for host, _ in _scraped(manifests):
        if host != f"{meta['name']}-serve-svc.{meta['namespace']}.svc":
            yield f"KubeRay creates no Service {host}"
    if manifests.of("ScrapeConfig") and len(list(_scraped(manifests))) != 1:
        yield "the page is the sum of all processes: more than one target counts them several times"


def _scraped(manifests: Manifests) -> Iterator[tuple[str, int]]:
    for config in manifests.of("ScrapeConfig"):
        for static in config["spec"]["staticConfigs"]:
            for target in static["targets"]:
                host, _, number = target.rpartition(":")
                yield host, int(number)


@check
def cluster_ports(manifests: Manifests) -> Iterator[str]:
    """The policy allows exactly Ray's fixed ports and the wire's, in both directions."""
    low, high = app_args(manifests).wire.ports or (0, 0)
    expected = {6379, 8265, 52365, *range(low, high + 1)}
    for pod in ray_pods(manifests):
        params = pod.group["rayStartParams"]
        expected |= {int(params[name]) for name in RAY_PORTS if name in params}
        expected |= set(range(int(params["min-worker-port"]), int(params["max-worker-port"]) + 1))
        if missing := [name for name in RAY_PORTS if name not in params]:
            yield f"{pod.name}: {missing} are left to chance"
    policy = manifests.one("NetworkPolicy", "raydix-cluster")["spec"]
    for direction in ("ingress", "egress"):
        let = _numbers(policy[direction][0]["ports"])
        if let != expected:
            yield f"{direction}: {_some(expected - let)} are closed, {_some(let - expected)} open for nothing"


def _numbers(rules: list[Doc]) -> set[int]:
    ends = [(int(rule["port"]), int(rule.get("endPort") or rule["port"])) for rule in rules]
    return {number for low, high in ends for number in range(low, high + 1)}


def _some(numbers: set[int]) -> str:
    return f"{len(numbers)} ports {sorted(numbers)[:5]}"


@check
def references(manifests: Manifests) -> Iterator[str]:
    """Volumes, Secrets, ConfigMaps and claims exist, or k8s/README.md says how to create them."""
    there = {(doc["kind"], doc["metadata"]["name"]) for doc in manifests.docs}
    there |= {("ConfigMap", name) for name in FOREIGN_CONFIG_MAPS}
    there |= {("Secret", name) for name in described_secrets()}
    for doc in manifests.docs:
        for kind, name in _referred(doc):
            if (kind, name) not in there:
                yield f"{doc['kind']} {doc['metadata']['name']} needs a {kind} {name}"
    for pod in manifests.pods:
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        for doc in manifests.of("StatefulSet"):
            if doc["metadata"]["name"] == pod.name:
                volumes |= {claim["metadata"]["name"] for claim in doc["spec"]["volumeClaimTemplates"]}
        mounts = [mount["name"] for c in pod.containers for mount in c.get("volumeMounts", [])]
        if pod.name == "head":
            mounts += [mount["name"] for mount in manifests.cluster["autoscalerOptions"]["volumeMounts"]]
        for name in mounts:
            if name not in volumes:
                yield f"{pod.name} mounts a volume {name} that it does not have"


def described_secrets() -> set[str]:
    """Names of the Secrets that the README's commands create."""
    text = (K8S / "README.md").read_text(encoding="utf-8")
    return set(re.findall(r"create secret generic (\S+)", text))


def _referred(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield from _referred(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key == "secretKeyRef":
            yield "Secret", item["name"]
        elif key == "persistentVolumeClaim":
            yield "PersistentVolumeClaim", item["claimName"]
        elif key in ("configMap", "configMapKeyRef"):
            yield "ConfigMap", item["name"]
        elif key == "secret" and "secretName" in item:
            yield "Secret", item["secretName"]
        elif key == "authorization" and "credentials" in item:
            yield "Secret", item["credentials"]["name"]
        else:
            yield from _referred(item)


def ray_pods(manifests: Manifests) -> list[Pod]:
    """The pods of the Ray cluster."""
    return [manifests.head, *manifests.workers]
