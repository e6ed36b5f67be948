"""Checks of the Dockerfile that need no build."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deployments.config.settings import IngressSettings
from tests.k8s.support.manifests import ROOT

LINES = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def of(instruction: str, *stages: str) -> list[str]:
    """What these instructions say, in all stages or in some."""
    found, stage = [], ""
    for name, said in STEPS:
        stage = said.split(" AS ")[-1] if name == "FROM" else stage
        if name == instruction and (not stages or stage in stages):
            found.append(said)
    return found


def stages() -> dict[str, str]:
    """The base of each stage, by the stage's name."""
    return {name: base for base, name in (step.split(" AS ") for step in of("FROM"))}


def ancestors(stage: str) -> list[str]:
    found = [stage]
    while (base := stages().get(found[-1])) is not None:
        found.append(base)
    return found


def test_hadolint_finds_no_fault() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (it is no dependency: its licence is the GPL)")
    ran = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout


def test_every_base_is_a_version() -> None:
    outside = {base for base in stages().values() if base not in stages()}
    assert outside and all(re.search(r":\d+\.\d+\.\d+", base) for base in outside), outside


def test_both_targets_build_on_the_same_runtime_and_copy_their_own_build() -> None:
    assert {"cpu", "cuda"} <= stages().keys()
    for target in ("cpu", "cuda"):
        assert "runtime" in ancestors(target)
        assert f"--from=build-{target} /opt/raydix /opt/raydix" in of("COPY")
        assert f"torch-{target}" in ancestors(f"build-{target}")


def test_the_kernels_are_compiled_for_the_python_and_system_they_run_on() -> None:
    """The slim image has no compiler; the full image of the same version has one."""
    built, run = ancestors("build-cpu")[-1], ancestors("cpu")[-1]
    assert built == run.replace("-slim", "") != run


def test_python_is_one_that_raydix_supports() -> None:
    version = re.search(r"python:(\d+)\.(\d+)", ancestors("cpu")[-1])
    low, high = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert version is not None and version[1] == "3" and int(low) <= int(version[2]) < int(high)


def test_every_package_is_pinned() -> None:
    installs = [step for step in of("RUN") if "pip install" in step]
    assert installs and all("-c constraints.txt" in step for step in installs)


def test_all_python_is_compiled_when_the_image_is_built() -> None:
    """At run time nothing can: see PYTHONDONTWRITEBYTECODE. The official images lack that of Python itself."""
    for target in ("cpu", "cuda"):
        assert any("PYTHONDONTWRITEBYTECODE=1" in said for said in of("ENV", *ancestors(target)))
        assert any("compileall" in run and "/usr/local/lib/python" in run for run in of("RUN", *ancestors(target)))
        last = of("RUN", f"build-{target}")[-1]
        assert "compileall" in last and "/opt/raydix" in last, "something is installed after the compilation"


def test_the_last_user_is_not_root() -> None:
    manifest = (ROOT / "k8s" / "base" / "rayservice.yaml").read_text(encoding="utf-8")
    for target in ("cpu", "cuda"):
        user = last_user(target)
        uid, gid = map(int, user.split(":"))
        assert uid > 0 and gid > 0
        assert f"--uid {uid}" in " ".join(of("RUN", *ancestors(target)))
        assert f"runAsUser: {uid}" in manifest


def last_user(target: str) -> str:
    """The user of a target's processes: that of its own stage, or of the nearest stage under it."""
    return next(users[-1] for stage in ancestors(target) if (users := of("USER", stage)))


def test_the_gpu_image_has_the_compiler_that_triton_needs() -> None:
    """Triton makes a launcher in C at each kernel's first launch, in the image that serves."""
    stages_of_it = ancestors("cuda")
    installed = {
        word
        for run in of("RUN", *stages_of_it)
        for command in run.split("&&")
        if "apt-get install" in command
        for word in command.split()
    }
    assert installed & {"gcc", "clang"}, "Triton finds no C compiler: no engine on a GPU computes its first step"
    assert "libc6-dev" in installed, "the compiler has no headers of C"
    base = stages_of_it[-1]
    assert base.startswith("python:"), f"Python.h is in the official images of Python; has {base} it too?"
    (driver,) = (said for said in of("ENV", "cuda") if "NVIDIA_DRIVER_CAPABILITIES" in said)
    assert "compute" in driver, "without it the node's driver brings no libcuda.so.1"


def test_triton_looks_for_the_compilers_that_the_image_is_checked_for() -> None:
    build = pytest.importorskip("triton.runtime.build")
    source = Path(build.__file__).read_text(encoding="utf-8")
    assert {"gcc", "clang"} <= set(re.findall(r'which\("(\w+)"\)', source))
    assert '["include"]' in source  # Python's headers


def test_the_health_check_asks_the_ingress_at_its_port() -> None:
    (check,) = of("HEALTHCHECK")
    interpreter, option, program = json.loads(check[check.index("CMD ") + 4 :])
    assert (interpreter, option) == ("python", "-c")
    compile(program, "HEALTHCHECK", "exec")
    (url,) = re.findall(r"'(http://.*?)'", program)
    assert url == f"http://127.0.0.1:{IngressSettings().port}/ready"
    assert of("EXPOSE") == [str(IngressSettings().port)]


def test_the_command_is_one_that_is_installed() -> None:
    (command,) = of("CMD")
    assert json.loads(command)[0] in PROJECT["project"]["scripts"]


def test_the_image_gets_the_copied_files_and_no_others() -> None:
    """The build sees what .dockerignore lets through, which is exactly what the package is made of."""
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let = {rule[1:] for rule in rules if rule.startswith("!")}
    assert "*" in rules and all((ROOT / path).exists() for path in let)
    packages = {
        pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    project = PROJECT["project"]
    assert let == packages | {
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        project["readme"],
        *project["license-files"],
    }
    for source in (step.split()[0] for step in of("COPY") if not step.startswith("--from")):
        assert source == "." or source in let


def test_no_secret_is_baked_in() -> None:
    for step in (*of("ENV"), *of("ARG")):
        assert not re.search(r"token|secret|password|key", step, re.I), step
