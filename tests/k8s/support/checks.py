"""What must hold of everything that is applied together. Each check tells what is wrong, or nothing.

schemas    does every object have the fields its kind has, and serve.yaml those of Ray Serve and of Raydix?
wiring     do names, labels and ports that refer to something refer to something that is there?
operation  drain, probes, sizes, rights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.k8s.support.manifests import Manifests

Check = Callable[[Manifests], Iterator[str]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Registers a check under its function's name."""
    CHECKS[function.__name__] = function
    return function
