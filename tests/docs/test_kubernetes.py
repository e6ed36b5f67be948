"""The files and names of k8s/ and the Dockerfile that docs/kubernetes.md mentions exist."""

from __future__ import annotations

import itertools
import re

from tests.docs.support.known_names import shell_lines
from tests.docs.support.markdown_pages import ROOT, read_page

PAGE = read_page(ROOT / "docs/kubernetes.md")
WORDS = [word for block in PAGE.blocks for line in shell_lines(block.text) for word in line]
MANIFESTS = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "k8s").rglob("*.yaml")))
MADE_BY_KUBERAY = {"raydix-serve-svc", "raydix-head-svc"}


def test_names_in_commands_and_sentences_are_in_the_manifests() -> None:
    texts = [*WORDS, *(span for _, span in PAGE.spans)]
    named = {name for text in texts for name in re.findall(r"\braydix-[a-z-]+\b", text)}
    assert {name for name in named - MADE_BY_KUBERAY if not re.search(rf"\b{name}\b", MANIFESTS)} == set()


def test_directories_are_there() -> None:
    named = [span for _, span in PAGE.spans if span.startswith("k8s/")]
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_the_image_has_the_targets() -> None:
    targets = {after for word, after in itertools.pairwise(WORDS) if word == "--target"}
    assert targets and targets <= set(re.findall(r" AS (\S+)", (ROOT / "Dockerfile").read_text()))
