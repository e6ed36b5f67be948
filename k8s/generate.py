"""Generates files that kustomize cannot use unchanged: `python k8s/generate.py`. tests/k8s checks that they are
up to date.

overlays/monitoring/rules.yaml    monitoring/alerts/raydix.rules.yaml as a PrometheusRule
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "monitoring" / "alerts" / "raydix.rules.yaml"
TARGET = ROOT / "k8s" / "overlays" / "monitoring" / "rules.yaml"

_HEAD = """\
# Made by k8s/generate.py from monitoring/alerts/raydix.rules.yaml: change that file instead.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: raydix
  namespace: raydix
spec:
"""


def prometheus_rule(rules: str) -> str:
    """Return the manifest, which contains the rule file's text indented by one level."""
    lines = (f"  {line}".rstrip() for line in rules.splitlines())
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
