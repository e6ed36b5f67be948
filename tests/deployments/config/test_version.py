"""The version that a service reports, and the tags of images, are pyproject.toml's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from deployments.config.version import raydix_version

ROOT = Path(__file__).resolve().parents[3]
STATED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_a_service_reports_the_version_of_the_package() -> None:
    assert raydix_version() == STATED


def test_tags_of_images_bear_the_version() -> None:
    pages = [ROOT / "Dockerfile", *(ROOT / "docs").glob("*.md"), *(ROOT / "k8s").rglob("*.yaml")]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    tags = {tag for text in texts for tag in re.findall(r"(?:\braydix:|newTag: )(\d[\w.]*)-(?:cpu|cuda)\b", text)}
    assert tags == {STATED}
