"""Checks of the deployment in operation: draining, probes, sizes, and permissions of containers."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator

from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_with
from deployments.config.args import AppArgs
from deployments.replica import pod as pod_commands
from deployments.replica.ranks import load_engine
from tests.k8s.support.checks import check
from tests.k8s.support.manifests import ROOT, Doc, Manifests, Pod
from tests.k8s.support.schema_checks import app_args
from tests.k8s.support.wiring_checks import ray_pods
from tests.support.bound_deployments import deployments_of

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
_HOOK_S = 5
_SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "m": 1e-3}


@check
def time_to_drain(manifests: Manifests) -> Iterator[str]:
    """The longest stream < Serve's shutdown < Ray's drain < the pod's grace < the old cluster's delay."""
    args, service = app_args(manifests), manifests.one("RayService")["spec"]
    drains = [
        replicas.drain_timeout_s for replicas in (args.ingresses, *(m.engines for m in args.served.values()))
    ]
    for pod in manifests.workers:
        container = pod.spec["containers"][0]
        hook = _hook_seconds(container)
        if hook < 5:
            yield f"{pod.name}: no preStop hook that waits until the Service has dropped the pod"
        times = (
            ("request_timeout_s", args.limits.request_timeout_s, min(drains)),
            ("drain_timeout_s", max(drains), _drain_seconds(container)),
            (DRAIN, _drain_seconds(container) + hook, pod.spec["terminationGracePeriodSeconds"]),
            (
                "terminationGracePeriodSeconds",
                pod.spec["terminationGracePeriodSeconds"],
                service["rayClusterDeletionDelaySeconds"],
            ),
        )
        for name, sooner, later in times:
            if sooner >= later:
                yield f"{pod.name}: {name} ({sooner} s) is not shorter than what must outlast it ({later} s)"


@check
def notices(manifests: Manifests) -> Iterator[str]:
    """Before an engine's pod ends, its hook makes the file that `drain.notice` names, and the pod has the time."""
    drain = app_args(manifests).drain
    for pod in manifests.workers:
        words = (
            pod.spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        )
        if pod.name == "engine" and words != ["sh", "-c", f"touch {drain.notice}; sleep {_HOOK_S}"]:
            yield f"engine: its preStop hook, {words}, does not make the file of drain.notice, {drain.notice}"
        grace_s = pod.spec["terminationGracePeriodSeconds"]
        if pod.name == "engine" and drain.grace_s >= grace_s:
            yield f"engine: drain.grace_s is {drain.grace_s:g}, but its pod ends after {grace_s} s"


def _hook_seconds(container: Doc) -> int:
    """Seconds that a container waits before SIGTERM."""
    hook = container.get("lifecycle", {}).get("preStop", {})
    words = hook.get("exec", {}).get("command", [""])
    slept = re.search(r"; sleep (\d+)$", words[-1])
    return int(slept[1]) if slept else int(hook.get("sleep", {}).get("seconds", 0))


def _drain_seconds(container: Doc) -> float:
    """Seconds that Ray drains on SIGTERM; its default is 30."""
    environment = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    return float(environment.get(DRAIN, 30))


@check
def probes(manifests: Manifests) -> Iterator[str]:
    """Each kind of worker has its own readiness probe, and engines write their files where the probe looks.

    An ingress that is stopped takes requests until the probe has failed and the Service has dropped the pod.
    """
    args = app_args(manifests)
    probe = {pod.name: pod.spec["containers"][0].get("readinessProbe", {}) for pod in manifests.workers}
    if probe["ingress"].get("httpGet") != {"path": "/ready", "port": "serve"}:
        yield "ingress: its readiness probe does not ask /ready"
    words = probe["engine"].get("exec", {}).get("command", [])
    if words != ["python", "-m", "deployments.replica.pod", "ready"]:
        yield "engine: its readiness probe does not ask `deployments.replica.pod ready`"
    notice = sum(probe["ingress"].get(part, 1) for part in ("periodSeconds", "timeoutSeconds"))
    notice *= probe["ingress"].get("failureThreshold", 3)
    if args.ingresses.shutdown_delay_s <= notice:
        yield f"ingresses.shutdown_delay_s is not longer than the {notice} s that the probe needs to notice"
    if args.health.beat_directory != pod_commands.BEATS:
        yield f"health.beat_directory is not {pod_commands.BEATS}, where the engine's probe looks"


@check
def disruption(manifests: Manifests) -> Iterator[str]:
    """A group of several pods keeps at least one during a drain; a group of one can be drained."""
    for pod in manifests.workers:
        least = pod.group["minReplicas"] * _num_hosts(pod)
        budgets = [
            doc["spec"] for doc in manifests.of("PodDisruptionBudget") if pod.matches(doc["spec"]["selector"])
        ]
        if least > 1 and not budgets:
            yield f"{pod.name}: {least} pods and no PodDisruptionBudget"
        for spec in budgets:
            if not isinstance(spec.get("minAvailable"), int):
                yield f"{pod.name}: for pods of a custom resource only a whole minAvailable counts"
            elif spec["minAvailable"] >= least:
                yield f"{pod.name}: minAvailable {spec['minAvailable']} of {least} pods blocks every drain"


@check
def capacity(manifests: Manifests) -> Iterator[str]:
    """Every replica fits the pods of exactly one group, the group has enough of them, and none runs on the head.

    A draining pod counts until it is gone, so a group has room for the pod that replaces it.
    """
    room = {pod.name: _ray_resources(pod) for pod in manifests.workers}
    placed: dict[str, list[tuple[str, Doc, dict[str, int]]]] = {name: [] for name in room}
    for name, (needs, least, most) in _replicas(manifests).items():
        if not needs.get("CPU"):
            yield f"{name} reserves no CPU, so it may run on the head"
        groups = [group for group, has in room.items() if _fits(needs, has)]
        if len(groups) != 1:
            yield f"{name} needs {needs}: it fits the groups {groups} of {room}"
            continue
        placed[groups[0]].append((name, needs, {"minReplicas": least, "maxReplicas": most}))
    for pod in manifests.workers:
        for bound in ("minReplicas", "maxReplicas"):
            wanted = [(needs, counts[bound]) for _, needs, counts in placed[pod.name]]
            spare = _num_hosts(pod) if bound == "maxReplicas" else 0
            needed, there = _pods_for(wanted, room[pod.name]) + spare, pod.group[bound] * _num_hosts(pod)
            if needed > there:
                names = [name for name, _, _ in placed[pod.name]]
                yield f"{pod.name}: {names} need {needed} pods, {bound} makes {there}"


def _num_hosts(pod: Pod) -> int:
    """Pods of each replica of a group."""
    number: int = pod.group.get("numOfHosts", 1)
    return number


@check
def stages(manifests: Manifests) -> Iterator[str]:
    """A group has as many pods together as an engine has stages, and only ranks reach all ports of others."""
    counts = {model.engine.pipeline_parallel_size for model in app_args(manifests).served.values()}
    for pod in manifests.workers:
        if pod.name == "engine" and {_num_hosts(pod)} != counts:
            yield f"engine: numOfHosts is {_num_hosts(pod)}, but engines have {counts} stages"
    policies = [doc for doc in manifests.of("NetworkPolicy") if doc["metadata"]["name"] == "raydix-ranks"]
    if len(policies) != (counts != {1}):
        yield f"{len(policies)} policies raydix-ranks for engines with {counts} stages"
    for spec in (doc["spec"] for doc in policies):
        rules = [*spec["ingress"], *spec["egress"]]
        selectors = [
            spec["podSelector"],
            *(peer["podSelector"] for rule in rules for peer in rule.get("from", rule.get("to"))),
        ]
        for selector in selectors:
            if [pod.name for pod in manifests.pods if pod.matches(selector)] != ["engine"]:
                yield f"raydix-ranks selects {selector}, not engines"
        if [rule["ports"] for rule in rules] != [[{"protocol": "TCP", "port": 1024, "endPort": 65535}]] * 2:
            yield "raydix-ranks does not let the ranks connect at any port"


def _replicas(manifests: Manifests) -> dict[str, tuple[Doc, int, int]]:
    """What a replica of each deployment reserves on a node, and on how many nodes at least and at most."""
    application = ServeDeploySchema.model_validate(manifests.serve).applications[0]
    args = AppArgs.model_validate(application.args)
    overrides = {d.name: d.ray_actor_options.model_dump(exclude_unset=True) for d in application.deployments}
    pools = args.pools
    found = {}
    for name, bound in deployments_of(build_with(args, load_engine)).items():
        options = overrides.get(name, bound.replica_config.ray_actor_options)
        own = {
            "CPU": options.get("num_cpus", 0),
            "GPU": options.get("num_gpus", 0),
            **options.get("resources", {}),
        }
        bundles = bound.replica_config.placement_group_bundles or [own]  # of the stages, which reserve the same
        scaling = pools[name].scaling if name in pools else None
        count = bound.config.num_replicas or 1
        least, most = (count, count) if scaling is None else (scaling.min, scaling.max)
        needs = {key: value for key, value in bundles[0].items() if value}
        found[name] = (needs, least * len(bundles), most * len(bundles))
    return found


def _ray_resources(pod: Pod) -> Doc:
    """The resources that a pod of a group offers, as Ray's own autoscaler reads them."""
    offered: Doc = _get_ray_resources_from_group_spec(copy.deepcopy(pod.group), False)
    return offered


def _fits(needs: Doc, has: Doc) -> bool:
    return all(has.get(name, 0) >= amount for name, amount in needs.items())


def _pods_for(wanted: list[tuple[Doc, int]], room: Doc) -> int:
    """Number of pods that hold these replicas, filled one after the other, largest replicas first."""
    pods: list[Doc] = []
    for needs, count in sorted(wanted, key=lambda one: -one[0]["CPU"]):
        for _ in range(count):
            target = next((left for left in pods if _fits(needs, left)), None)
            if target is None:
                target = dict(room)
                pods.append(target)
            for name, amount in needs.items():
                target[name] -= amount
    return len(pods)


@check
def resources(manifests: Manifests) -> Iterator[str]:
    """Every container has CPU and memory limits, and requests exactly those."""
    sized = [(f"{pod.name}/{c['name']}", c.get("resources", {})) for pod in manifests.pods for c in pod.containers]
    sized.append(("autoscaler", manifests.cluster["autoscalerOptions"].get("resources", {})))
    for name, sizes in sized:
        if not {"cpu", "memory"} <= sizes.get("limits", {}).keys():
            yield f"{name} has no limits for CPU and memory"
        if sizes.get("requests") != sizes.get("limits"):
            yield f"{name}: requests {sizes.get('requests')} are not its limits {sizes.get('limits')}"
    for pod in ray_pods(manifests):
        store = int(pod.group["rayStartParams"]["object-store-memory"])
        memory = pod.spec["containers"][0].get("resources", {}).get("limits", {}).get("memory", "0")
        if store > 0.3 * _quantity(memory):
            yield f"{pod.name}: an object store of {store} B in {memory}"


def _quantity(text: str) -> float:
    number, suffix = re.fullmatch(r"([0-9.]+)(Ki|Mi|Gi|m|)", text).groups()  # type: ignore[union-attr]
    return float(number) * _SUFFIXES.get(suffix, 1)


@check
def gpus(manifests: Manifests) -> Iterator[str]:
    """Engine pods for GPUs have a GPU and tolerate the taint of GPU nodes; no other pod has one."""
    wanted = any(model.gpus_per_engine for model in app_args(manifests).served.values())
    for pod in manifests.pods:
        limits = [c.get("resources", {}).get("limits", {}) for c in pod.containers]
        has = any("nvidia.com/gpu" in limit for limit in limits)
        if has != (wanted and pod.name == "engine"):
            yield f"{pod.name}: {'has' if has else 'lacks'} a GPU"
        keys = [toleration.get("key") for toleration in pod.spec.get("tolerations", [])]
        if has and "nvidia.com/gpu" not in keys:
            yield f"{pod.name}: does not tolerate the taint of GPU nodes"


@check
def images(manifests: Manifests) -> Iterator[str]:
    """Every image names its version."""
    for pod in manifests.pods:
        for container in pod.containers:
            image = container["image"]
            tag = image.rsplit("/", 1)[-1].partition(":")[2]
            if "@sha256:" not in image and (not tag or not any(c.isdigit() for c in tag)):
                yield f"{pod.name}/{container['name']}: {image} is not a version"


@check
def rights(manifests: Manifests) -> Iterator[str]:
    """Containers have no root, no capabilities, no Kubernetes token, and only /tmp to write to."""
    for pod in manifests.pods:
        user = pod.spec.get("securityContext", {})
        if not user.get("runAsNonRoot") or not user.get("runAsUser"):
            yield f"{pod.name}: may run as root"
        if user.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name}: no seccomp profile"
        if pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: gets a token of Kubernetes"
        for container in pod.containers:
            yield from _locked(f"{pod.name}/{container['name']}", container)
    yield from _locked("autoscaler", manifests.cluster["autoscalerOptions"])
    scratch = {"name": "tmp", "mountPath": "/tmp"}
    for pod in ray_pods(manifests):
        if scratch not in pod.spec["containers"][0]["volumeMounts"]:
            yield f"{pod.name}: nowhere to write: no volume on /tmp"
    if scratch not in manifests.cluster["autoscalerOptions"]["volumeMounts"]:
        yield "autoscaler: nowhere to write: no volume on /tmp"


def _locked(name: str, container: Doc) -> Iterator[str]:
    context = container.get("securityContext", {})
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    for key, value in wanted.items():
        if context.get(key) != value:
            yield f"{name}: {key} is {context.get(key)}, not {value}"


@check
def keys(manifests: Manifests) -> Iterator[str]:
    """On GPUs no request is served without a key, and only ingress pods see the keys' hashes."""
    args = app_args(manifests)
    if args.access_file is None:
        if any(model.gpus_per_engine for model in args.served.values()) and not args.tenants:
            yield "everybody may send requests: there are neither access_file nor tenants"
        return
    folder = args.access_file.rpartition("/")[0]
    for pod in ray_pods(manifests):
        secrets = {volume["name"] for volume in pod.spec["volumes"] if "secret" in volume}
        mounts = pod.spec["containers"][0]["volumeMounts"]
        has = any(mount["mountPath"] == folder and mount["name"] in secrets for mount in mounts)
        if has != (pod.name == "ingress"):
            yield f"{pod.name}: {'has' if has else 'lacks'} a Secret at {folder}"


@check
def denied_by_default(manifests: Manifests) -> Iterator[str]:
    """Connections that no policy allows are denied, both ways."""
    policies = [doc["spec"] for doc in manifests.of("NetworkPolicy") if doc["spec"]["podSelector"] == {}]
    if not any(set(spec["policyTypes"]) == {"Ingress", "Egress"} and len(spec) == 2 for spec in policies):
        yield "no NetworkPolicy denies everything to all pods"
    labels = manifests.one("Namespace")["metadata"].get("labels", {})
    if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
        yield "the namespace admits pods with more permissions than Raydix's need"


@check
def cluster(manifests: Manifests) -> Iterator[str]:
    """The head runs no replica, takes no traffic and answers to token holders; Ray is the version in the image."""
    service, ray = manifests.one("RayService")["spec"], manifests.cluster
    if ray["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
        yield "the head offers CPUs: replicas may run on it, and end with it"
    if not service.get("excludeHeadPodFromServeSvc"):
        yield "the Service leads to the head, too"
    if ray.get("authOptions", {}).get("mode") != "token":
        yield "all who reach Ray's ports may run code: authOptions.mode is not token"
    if not ray.get("enableInTreeAutoscaling") or ray.get("autoscalerOptions", {}).get("version") != "v2":
        yield "no autoscaler v2"
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    if pinned is None or ray["rayVersion"] != pinned[1]:
        yield f"rayVersion {ray['rayVersion']} is not the image's"
    release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    for pod in ray_pods(manifests):
        if f":{release}-" not in pod.spec["containers"][0]["image"]:
            yield f"{pod.name}: its image is not of this release, {release}"
