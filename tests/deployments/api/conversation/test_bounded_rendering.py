"""A chat template that loops or grows without end is stopped, with the limit that it broke; others are not."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.api.conversation.bounded_rendering import _MULTIPLYING
from deployments.api.conversation.template import ChatTemplate, TemplateRefused, TemplateRunaway, _environment
from deployments.config.settings import ChatSettings

STOPPED = r"chat\.max_rendered_chars|bits|width|digits|blanks|not supported|calls itself"
HELLO = [{"role": "user", "content": "hello"}]


class Tokenizer:
    """A tokenizer that has a template only."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - as transformers has it

    def __init__(self, template: str) -> None:
        self.template = template

    def get_chat_template(self, tools: Any = None) -> str:
        return self.template


def render(template: str, **settings: Any) -> str:
    chat = ChatTemplate(Tokenizer(template), ChatSettings(**settings))  # type: ignore[arg-type]
    return chat.render(HELLO, None, add_generation_prompt=True)


DOUBLED = "{% set x = 'ab' %}" + "{% set x = BODY %}" * 60 + "{{ x|length }}"
LISTS = "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 60


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a + b }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in range(99999) %}{% set b = range(99999)|list|sort|length %}{% endfor %}",
        "{% for a in [[[1, 2], [3, 4]]] * 30000 recursive %}{{ loop(range(90000)|list) }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped(template: str) -> None:
    with pytest.raises(TemplateRunaway, match=r"chat\.template_timeout_s|calls itself too deeply"):
        render(template, template_timeout_s=0.05)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}", "{{ 10**10 * 'a' }}", "{{ ['a'] * 10**10 }}", "{{ (1, 2) * 10**9 }}",
        "{{ 10**(10**10) }}", "{{ 'a'|center(10**10) }}", "{{ 'a'.center(10**10) }}", "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.rjust(10**10) }}", "{{ '1'.zfill(10**10) }}", "{{ '\\t'.expandtabs(10**10) }}",
        "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%.1000000000f' % 1 }}",
        "{{ '%1000000000d'|format(1) }}", "{{ '{:1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**5) }}", "{{ ('a' * 10**6)|replace('', 'b' * 10**5) }}",
        "{{ range(99999)|join('b' * 10**6) }}", "{{ ('b' * 10**6).join(range(99999)|map('string')) }}",
        "{{ ('b' * 10**6).join(['a'] * 99999) }}",
        "{{ ('a\\n' * 10**6)|indent(99999) }}", "{{ ('a\\n' * 10**6)|indent('b' * 10**6) }}",
        "{{ ['a'] | tojson(indent=10**9) }}", "{{ ['a']|batch(10**9, 'b')|list }}",
        "{{ ['a']|slice(10**9)|list }}", "{{ 1.5|round(10**9, 'ceil') }}",
        "{{ ['a']|map('center', 10**9)|list }}",
        DOUBLED.replace("BODY", "x ~ x"), DOUBLED.replace("BODY", "x + x"), DOUBLED.replace("BODY", "[x, x]|join"),
        DOUBLED.replace("BODY", "x * 2"), DOUBLED.replace("BODY", "'%s%s' % (x, x)"),
        DOUBLED.replace("BODY", "'{}{}'.format(x, x)"), DOUBLED.replace("BODY", "x.replace('ab', 'abab')"),
        DOUBLED.replace("{% set x = BODY %}", "{% set x %}{{ x }}{{ x }}{% endset %}"),
        "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLED.replace("BODY", "f(x)"),
        "{% set x = 7 %}" + "{% set x = x * x %}" * 60 + "{{ x }}",
        LISTS + "{{ x }}", LISTS + "{{ x|string }}", LISTS + "{{ x|tojson }}", LISTS + "{{ x == [x] }}",
        LISTS.replace("[x, x]", "{'a': x, 'b': x}") + "{{ x }}", LISTS.replace("[x, x]", "(x, x)") + "{{ x }}",
        LISTS.replace("[x, x]", "dict(a=x, b=x)") + "{{ x }}",
        LISTS.replace("[x, x]", "namespace(a=x, b=x)") + "{{ x }}",
        "{% for a in range(99999) %}{{ 'a' * 10000 }}{% endfor %}", "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ 'a'.encode().center(10**9) }}",
    ],
)  # fmt: skip
def test_a_template_that_grows_without_end_is_stopped(template: str) -> None:
    with pytest.raises(TemplateRefused, match=STOPPED):
        render(template, max_rendered_chars=2**20)


def test_the_rendered_text_is_bounded_as_configured() -> None:
    assert render("{{ 'a' * 1000 }}", max_rendered_chars=1024) == "a" * 1000
    with pytest.raises(TemplateRunaway, match="more than 1024 characters"):
        render("{{ 'a' * 1000 }}{{ 'a' * 1000 }}", max_rendered_chars=1024)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ loop.index ~ m.content|trim }}{{ loop.last }}{% endfor %}", "1helloTrue"),
        ("{% for m in messages if m.role == 'system' %}{{ m }}{% else %}none{% endfor %}", "none"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }},{% endfor %}", "2,12,"),
        ("{% set n = namespace(n=0) %}{% for m in messages %}{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}", "1"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f('b') }}", "<a><b>"),
        ("{{ {'a': [1, 2.5, none], 'b': 'é'}|tojson }}", '{"a": [1, 2.5, null], "b": "é"}'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ 'a b c'.split(' ')|join(', ') }}{{ 'ab'.replace('b', 'c') }}", "a, b, cac"),
        ("{{ '%s-%05d' % ('x', 7) }}{{ '{:>6}|{}'.format('a', missing) }}{{ missing }}", "x-00007     a|"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}y", "y"),
        ("{{ messages|map(attribute='content')|list }}{{ messages[::-1]|length }}{{ 2 ** 10 }}", "['hello']11024"),
        ("{% filter upper %}{{ 'a\\nb'|indent(2) }}{% endfilter %}", "A\n  B"),
    ],
)
def test_templates_within_the_bounds_render_as_before(template: str, expected: str) -> None:
    assert render(template) == expected


HARMLESS = """
    abs attr capitalize count d default dictsort e escape filesizeformat first float forceescape groupby int items
    last length list lower map max min random reject rejectattr reverse safe select selectattr sort string
    striptags sum title trim truncate unique upper urlencode wordcount"""


def test_every_filter_is_known_to_be_harmless_or_bounded() -> None:
    """A filter that a new version of Jinja brings has to be looked at."""
    known = f"{HARMLESS} raydix_tick raydix_made raydix_joined"
    assert set(_environment().filters) == {*known.split(), *_MULTIPLYING}
