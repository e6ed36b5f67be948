"""transformers has the sandbox in which chat templates are rendered (docs/frameworks.md)."""

from __future__ import annotations

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template


def test_a_compiled_template_has_a_sandbox_with_what_templates_expect() -> None:
    environment = _compile_jinja_template("{{ 1 }}").environment
    assert isinstance(environment, ImmutableSandboxedEnvironment)
    assert {"raise_exception", "strftime_now"} <= environment.globals.keys()
    assert "tojson" in environment.filters and (environment.trim_blocks, environment.lstrip_blocks) == (True, True)
