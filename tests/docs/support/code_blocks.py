"""Executes or validates the fenced blocks of pages; a marker says why a block is not executed."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.config.args import AppArgs
from deployments.config.serve_schema import read_serve_config
from tests.docs.support.known_names import shell_lines
from tests.docs.support.markdown_pages import ROOT, Block

ADDRESS = "http://127.0.0.1:8000"
"""Where the service answers on the pages; in tests it answers elsewhere."""
NEEDS = {"cluster", "docker", "gpu", "network", "prometheus", "grafana"}
EXECUTED = ("sh", "console", "python")
TOOLS = ("curl", "kubectl", "promtool")
"""Programs that pages use and some machines lack."""
SERVE_SCHEMAS = (ServeDeploySchema, HTTPOptionsSchema, ServeApplicationSchema, DeploymentSchema)
_TIMEOUT_S = 300
_SHIMS = {
    "raydix": 'exec {python} -m deployments.cli "$@"',
    "python": 'exec {python} "$@"',
    "curl": 'exec {curl} --silent --show-error --fail-with-body "$@"',
}


class Sandbox:
    """A directory that looks like a checkout, in which a page's commands run."""

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self.directory = directory
        self.namespace: dict[str, Any] = {}
        for path in ROOT.iterdir():
            if not path.name.startswith("."):
                (directory / path.name).symlink_to(path)
        programs = directory / ".venv/bin"
        programs.mkdir(parents=True)
        for name, line in _SHIMS.items():
            (programs / name).write_text(
                f"#!/bin/sh\n{line.format(python=sys.executable, curl=shutil.which('curl'))}\n"
            )
            (programs / name).chmod(stat.S_IRWXU)
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._env = {
            **ours,
            "PATH": f"{programs}:{ours['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "120",
            **variables,
        }

    def run(self, block: Block, url: str) -> None:
        """Execute a block against the service at `url`. Raises AssertionError, or what its Python raised."""
        text = _adapted(block.text, url)
        if block.language == "python":
            exec(compile(text, str(block), "exec"), self.namespace)
        elif block.language == "console":
            for command, expected in dialogue(text):
                status, output = self._shell(command)
                assert status == 0 or expected, f"{block}: {command}\n{output}"
                assert is_like(output, expected), f"{block}: {command}\n{output}\nis not like\n{expected}"
        else:
            status, output = self._shell(text)
            assert status == 0, f"{block}: {output}"

    def _shell(self, text: str) -> tuple[int, str]:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.directory,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
        return result.returncode, result.stdout


def missing_tools(block: Block) -> list[str]:
    """Return those of `TOOLS` that a block needs and this machine lacks."""
    words = {word for line in shell_lines(block.text) for word in line}
    return [tool for tool in TOOLS if tool in words and shutil.which(tool) is None]


def _adapted(text: str, url: str) -> str:
    """`text` with the default address replaced by `url`, which commands are given where they name none."""
    text = re.sub(r"(\braydix (?:chat|top|batch)\b)(?! --url)", rf"\1 --url {ADDRESS}", text)
    return text.replace(ADDRESS, url)


def dialogue(text: str) -> list[tuple[str, str]]:
    """A console block's commands, `$ ...` and `> ...` where they go on, each with the output shown below it."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command: $ ..."
    found = []
    for part in parts[1:]:
        first, *rest = part.splitlines()
        more = list(itertools.takewhile(lambda line: line.startswith("> "), rest))
        found.append(("\n".join([first, *(line[2:] for line in more)]), "\n".join(rest[len(more) :])))
    return found


def is_like(output: str, expected: str) -> bool:
    """Whether output is as shown, `…` standing for anything; nothing shown is like everything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return not expected.strip() or re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def validate_yaml(text: str) -> None:
    """Check a Serve config, or an application's arguments. Raises ValueError that says what is wrong."""
    document = yaml.safe_load(text)
    if "applications" not in document:
        AppArgs.model_validate(document)
        return
    for application in read_serve_config(document).applications:
        AppArgs.model_validate(application.args)


def marker_problem(block: Block) -> str | None:
    """Return what is wrong with a block's marker; None when it is right."""
    assert block.marker is not None
    kind, value = block.marker
    if kind == "needs":
        return None if value in NEEDS else f"needs {value!r}; there are {sorted(NEEDS)}"
    texts = [_said_by(target.strip()) for target in value.split(",")]
    if None in texts:
        return f"no such test or file among {value}"
    for words in shell_lines(block.text):
        if words and not any(_has(text or "", words) for text in texts):
            return f"{value} does not run {' '.join(words)}"
    return None


def _said_by(target: str) -> str | None:
    """The strings and names in a test, one a line, or a script's text; None when it does not exist."""
    name, _, test = target.partition("::")
    path = ROOT / name
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    if not test:
        return text
    tree = ast.parse(text)
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == test), None)
    if function is None:
        return None
    nodes = list(ast.walk(function))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return "\n".join([*names, *(str(node.value) for node in nodes if isinstance(node, ast.Constant))])


def _has(said: str, words: list[str]) -> bool:
    """Whether a script has the command, or a test runs it: its subcommand and options, whatever their values."""
    if " ".join(words) in said:
        return True
    if words[0] == "make":
        words = _recipe(words[1])
    lines = said.splitlines()
    return len(words) > 1 and all(word in lines for word in words if word == words[1] or word.startswith("--"))


def _recipe(target: str) -> list[str]:
    """The words of the first line that `make` runs for a target; none when there is no such target."""
    makefile = (ROOT / "Makefile").read_text()
    match = re.search(rf"^{re.escape(target)}:.*\n\t@?(?:exec )?(.*)$", makefile, re.MULTILINE)
    return match[1].split() if match else []
