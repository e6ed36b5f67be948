"""Every setting, metric, command, option, endpoint, header and file that a page names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from deployments.api.fields.protocol import ChatRequest, CompletionRequest
from deployments.config.removed import REMOVED
from tests.docs.support.code_blocks import SERVE_SCHEMAS
from tests.docs.support.code_references import PACKAGES, code_problem, is_in_module, names_code
from tests.docs.support.known_names import (
    command_problem,
    find_command,
    metric_names,
    options,
    raydix_calls,
    routes,
    settings,
    shell_lines,
)
from tests.docs.support.markdown_pages import DOCS, NAME_PAGES, ROOT, Block, files, read_page
from tests.router.support.private_names import private_names

_SECTIONS = {path.split(".")[0] for path in settings() if "." in path}
_SETTING = re.compile(rf"({'|'.join(map(re.escape, _SECTIONS))})(\.[a-z_\[\]]+)+")
_ENDPOINT = re.compile(r"(?:([A-Z]+) )?(/[^\s?]*)(\?\S*)?")
_FILE = re.compile(r"[\w.-]+(/[\w.-]+)*/?(\.\w+)?")
_IDENTIFIER = re.compile(r"[A-Za-z]\w*_\w+")
_OF_OTHERS = {
    *("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE"),
    *("RAY_ADDRESS", "RAY_AUTH_MODE", "~/.ray/auth_token", "RAY_SERVE_ENABLE_HA_PROXY"),
    *private_names(),
}
"""Names that belong to Hugging Face's hub and to Ray."""
_OF_SERVE = {name for schema in SERVE_SCHEMAS for name in schema.model_fields}
_IN_CHAT = {"/stats", "/help", "/reset", "/quit"}


@cache
def sources() -> str:
    """Return all code and configuration of the repository except its tests."""
    paths = [ROOT / "Makefile", *files(".py", ".yaml", ".toml", ".jinja", ".json")]
    ours = [path for path in paths if not path.is_relative_to(ROOT / "tests") and path.stat().st_size < 2**18]
    return "\n".join(path.read_text(encoding="utf-8") for path in ours)


@cache
def words() -> set[str]:
    """Return all words of `sources`."""
    return set(re.findall(r"\w+", sources()))


def problem(span: str, directory: Path = ROOT) -> str | None:
    """Return what is wrong with a name in a page of `directory`; None when it exists, or is no name of ours."""
    if span.partition("=")[0] in _OF_OTHERS | _OF_SERVE:
        return None
    if match := re.fullmatch(r"(raydix_\w+)(\{.*\})?", span):
        return None if match[1] in metric_names() else "no such metric"
    if _SETTING.fullmatch(span) and (is_setting(span) or not is_in_module(span)):
        return None if is_setting(span) else "no such setting"
    if names_code(span):
        return code_problem(span, directory)
    if span.startswith("raydix "):
        return wrong_command(span.split()[1:])
    if span.startswith("--"):
        return None if span.split()[0].partition("=")[0] in options() else "no such option of raydix"
    if re.fullmatch(r"x-[a-z-]+\*?", span):
        return None if span.rstrip("*") in sources() else "no such header"
    if (match := _ENDPOINT.fullmatch(span)) and span not in _IN_CHAT:
        return None if is_answered(match[1], match[2]) else "no such endpoint"
    if "/" in span and Path(span).suffix in (".py", ".yaml", ".md", ".json") and _FILE.fullmatch(span):
        return None if (directory / span).exists() else "no such file"
    unknown = [name for name in _IDENTIFIER.findall(span) if name not in words()]
    return f"nothing here is called {unknown}" if unknown else None


def is_setting(name: str) -> bool:
    """Whether this is a setting, or a section of them."""
    return name in settings() or any(path.startswith(f"{name}.") for path in settings())


def wrong_command(words: list[str]) -> str | None:
    """Check a command in a sentence, which may lack its arguments and the values of its options."""
    try:
        command, arguments = find_command(words)
    except LookupError as error:
        return str(error)
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    return f"no such option: {given - options(command)}" if given - options(command) else None


def is_answered(method: str | None, path: str) -> bool:
    """Whether the API has a route for a path, in which capitals stand for what varies."""
    known = routes()
    return any(p.fullmatch(path) for one in ([method] if method else known) for p in known.get(one, ()))


@pytest.mark.parametrize("path", NAME_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    former = REMOVED if path.name == "upgrade.md" else {}
    spans = [(line, span) for line, span in read_page(path).spans if span not in former]
    assert [
        f"{path.name}:{line}: {span}: {what}" for line, span in spans if (what := problem(span, path.parent))
    ] == []


@pytest.mark.parametrize("path", NAME_PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_name_commands_metrics_and_files_that_exist(path: Path) -> None:
    """All blocks are checked, executed or not."""
    assert [f"{block}: {what}" for block in read_page(path).blocks for what in problems(block)] == []


def problems(block: Block) -> list[str]:
    """Return what is wrong with the names in a block."""
    found = [f"no metric {name}" for name in re.findall(r"\braydix_\w+", block.text) if name not in metric_names()]
    if block.language in ("sh", "console"):
        found += [what for call in raydix_calls(block.text) if (what := command_problem(call))]
        words = [word for line in shell_lines(block.text) for word in line]
        named = [word for word in words if word.startswith(("k8s/", "deployments/", "monitoring/", "benchmarks/"))]
        found += [f"no file {word}" for word in named if not (ROOT / word).exists()]
    return found


def test_every_endpoint_and_field_is_in_the_api_page() -> None:
    spans = {span for _, span in read_page(ROOT / "docs/api.md").spans}
    named = [match for span in spans if (match := _ENDPOINT.fullmatch(span))]
    for method, patterns in routes().items():
        if method != "HEAD":
            for pattern in patterns:
                assert any((m[1] or "GET") == method and pattern.fullmatch(m[2]) for m in named), (method, pattern)
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert sorted(fields - spans) == []


@pytest.mark.parametrize(
    "span",
    [
        "engine.page_sizes", "admission.max", "raydix_request_total", "raydix_requests_totals{a}", "raydix sevre",
        "raydix chat --modle x", "--verbos", "x-raydix-replicas", "POST /v1/models", "/v1/router/decision",
        "deployments/setting.py", "max_runing", "engine/program/loop.py: no_such", "engine/lop.py: EngineLoop",
        "engine/attentions/",
        "engine.lop.EngineLoop", "engine.program.loop.EngineLop", "EngineLoop.no_such", "EngineLopp",
        "engine/program/loop.py: EngineLoop.no_such",
    ],
)  # fmt: skip
def test_a_name_that_does_not_exist_is_noticed(span: str) -> None:
    assert problem(span) is not None


@pytest.mark.parametrize(
    "span",
    [
        "engine.page_size", "engines.autoscaling", "tenants[].weight", 'raydix_requests_total{slo="ttft"}',
        "raydix_engine_step_seconds_bucket", "raydix info MODEL --dtype", "--policy cost", "x-ratelimit-*",
        "DELETE /v1/models/NAME", "/v1/router/decisions?limit=5", "/stats", "deployments/config/settings.py",
        "max_running", "temperature", "SIGTERM", "engine/program/loop.py: EngineLoop",
        "engine/program/loop.py: EngineLoop.step",
        "engine/attention/",
        "engine.program.loop.EngineLoop", "engine.program.loop", "EngineLoop.step",
        "tests/docs/test_names.py: problem",
        "engine/kernels/native/gemm.[ch]",
    ],
)  # fmt: skip
def test_names_that_exist_pass(span: str) -> None:
    assert problem(span) is None


def test_docs_are_there() -> None:
    """The tests above would pass without any page."""
    names = {page.stem for page in DOCS}
    assert names >= {"index", "laptop", "your-model", "tuning", "upgrade", "security", "api"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_the_architecture_page(package: str) -> None:
    """Every folder of modules has a row, and every module that lies in no room."""
    spans = {span for _, span in read_page(ROOT / "ARCHITECTURE.md").spans}
    modules = [path for path in files(".py") if path.is_relative_to(ROOT / package)]
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in modules}
    alone = {str(path.relative_to(ROOT)) for path in modules if path.parent == ROOT / package}
    missing = (rooms - {f"{package}/"}) | {path for path in alone if not path.endswith("__init__.py")}
    assert sorted(missing - spans) == []
