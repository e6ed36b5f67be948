"""What docs/kubernetes.md says of k8s/ is there."""

from __future__ import annotations

import re

import pytest

from tests.docs.names import shell_lines
from tests.docs.pages import ROOT, read_page

PAGE = ROOT / "docs/kubernetes.md"
MANIFESTS = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "k8s").rglob("*.yaml")))
MADE_BY_KUBERAY = {"raydix-serve-svc", "raydix-head-svc"}


def test_what_commands_and_sentences_name_is_in_the_manifests() -> None:
    page = read_page(PAGE)
    words = [word for block in page.blocks for line in shell_lines(block.text) for word in line]
    words += [span for _, span in page.spans]
    named = {name for word in words for name in re.findall(r"\braydix-[a-z-]+\b", word)}
    assert {name for name in named - MADE_BY_KUBERAY if not re.search(rf"\b{name}\b", MANIFESTS)} == set()


def test_directories_are_there() -> None:
    directories = [span for _, span in read_page(PAGE).spans if span.startswith("k8s/")]
    assert directories and [name for name in directories if not (ROOT / name).is_dir()] == []


@pytest.mark.parametrize("name", ["request_timeout_s", "drain_timeout_s", "terminationGracePeriodSeconds",
                                  "rayClusterDeletionDelaySeconds"])  # fmt: skip
def test_times_are_those_of_the_files(name: str) -> None:
    [shown] = re.findall(rf"^ +.*\b{name} (\d+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(rf"^ *{name}: (\d+)", MANIFESTS, re.MULTILINE)) == {shown}


def test_the_drain_is_that_of_the_files() -> None:
    [shown] = re.findall(r"preStop drain (\d+)", PAGE.read_text(encoding="utf-8"))
    assert set(re.findall(r'drain, "(\d+)"', MANIFESTS)) == {shown}
