"""Routing policies by name: those of `POLICIES`, and custom classes as "package.module:Class".

A custom class is made without arguments and has the method of `router.policies.Policy`. Its decisions are
checked before they are used: a replica that does not exist, or a missing one, would fail requests.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from router.cost import Candidate, RouteQuery
from router.policies import POLICIES, Decision, Policy, Reason, Split

_PATH = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")
_REASONS = frozenset(get_args(Reason))


class PolicyError(Exception):
    """A custom policy raised an exception or returned no valid decision."""


@dataclass(frozen=True, slots=True)
class CustomPolicy:
    """A custom policy; its decisions are checked and carry the name from the settings."""

    name: str
    policy: Policy

    def decide(self, query: RouteQuery, replicas: Sequence[Candidate], rng: random.Random) -> Decision:
        """Raises PolicyError when the policy failed or its decision does not order all replicas."""
        names = [candidate.replica for candidate in replicas]
        if not names:
            return Split(replicas).decision([], "rule", self.name, query)
        try:
            decision = self.policy.decide(query, replicas, rng)
        except Exception as error:
            raise PolicyError(f"the routing policy {self.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(decision, Decision) or sorted(decision.order) != sorted(names):
            raise PolicyError(
                f"the routing policy {self.name} must return a Decision that orders {names}, each once, "
                f"got {decision!r}"
            )
        reason = decision.reason if decision.reason in _REASONS else "rule"
        return replace(decision, policy=self.name, reason=reason)


def policy_named(name: str, policies: Mapping[str, Callable[[], Policy]] = POLICIES) -> Policy:
    """Make a new policy: one of `policies`, or a custom one, whose module is imported.

    Raises ValueError for a name that is neither, and for a class that cannot be imported, made or used.
    """
    check_policy_name(name, policies)
    return policies[name]() if name in policies else CustomPolicy(name, _own_policy(name))


def check_policy_name(name: str, policies: Mapping[str, Callable[[], Policy]] = POLICIES) -> str:
    """Return `name` if it has a valid form; imports nothing. Raises ValueError otherwise."""
    if name not in policies and not _PATH.fullmatch(name):
        known = ", ".join(policies)
        raise ValueError(
            f"unknown routing policy {name!r}; there are {known}, and a class of your own as package.module:Class"
        )
    return name


def _own_policy(path: str) -> Policy:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module can raise anything while it is imported
        raise ValueError(
            f"routing policy {path}: the module {module_name} cannot be imported "
            f"({type(error).__name__}: {error}); it must be on the Python path of every ingress"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        raise ValueError(f"routing policy {path}: the module {module_name} has no class {class_name}")
    if not callable(getattr(cls, "decide", None)):
        raise ValueError(
            f"routing policy {path}: the class has no method decide(query, replicas, rng); "
            "see Policy in router/policies.py"
        )
    try:
        policy: Policy = cls()
    except Exception as error:
        raise ValueError(
            f"routing policy {path}: the class cannot be made without arguments ({type(error).__name__}: {error})"
        ) from error
    return policy
