"""The registry of checks on manifests that are applied together. A check yields a message for each thing wrong.

schema_checks      does every object have the fields of its kind, and serve.yaml those of Ray Serve and Raydix?
wiring_checks      does every name, label and port that refers to something refer to something that exists?
operation_checks   do draining, probes, sizes and permissions fit together?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.k8s.support.manifests import Manifests

Check = Callable[[Manifests], Iterator[str]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function
