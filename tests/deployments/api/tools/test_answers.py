"""Every format is parsed alike however its text is cut; what is called is found, and nothing is lost."""

from __future__ import annotations

from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from deployments.api import exact_json
from deployments.api.tools.formats import FORMATS
from tests.deployments.support.tool_answers import (
    OBJECTS,
    Answer,
    Found,
    answers,
    cut,
    damaged,
    find,
    places,
    squeezed,
)
from tests.support.examples import examples

formats = st.sampled_from(sorted(FORMATS))
WORD = "zq7"
JSON_FORMATS = [name for name, form in FORMATS.items() if form.rules is None]


def exact(answer: Answer, found: Found) -> Found:
    """What is found, with arguments in one spelling where the format has its own."""
    if answer.format in JSON_FORMATS:
        return found
    calls = [(name, exact_json.write(exact_json.parse(arguments))) for name, arguments in found.calls]
    return Found(found.reasoning, found.content, calls, found.is_call)


@settings(max_examples=examples(100))
@given(answer=formats.flatmap(answers), at=places)
def test_what_a_model_says_is_found_wherever_its_text_is_cut(answer: Answer, at: list[int]) -> None:
    note(str(answer))
    expected = exact(answer, answer.expected)
    for pieces in ([answer.said], cut(answer.said, at), list(answer.said)):
        assert exact(answer, find(answer, pieces)) == expected


@settings(max_examples=examples(100))
@given(answer=formats.flatmap(damaged), at=places)
def test_any_text_is_parsed_alike_wherever_it_is_cut(answer: Answer, at: list[int]) -> None:
    note(str(answer))
    found = find(answer, [answer.said])
    assert found == find(answer, cut(answer.said, at)) == find(answer, list(answer.said))
    if not found.calls and answer.thoughts is None:
        assert found.content == squeezed(answer.said)


@settings(max_examples=examples(100))
@given(answer=formats.flatmap(answers), place=st.integers(0, 10_000), at=places)
def test_no_word_is_lost(answer: Answer, place: int, at: list[int]) -> None:
    """Wherever it is put in, but in a header of a channel, or a member of a call that is not its arguments."""
    assume(answer.format not in ("harmony", *OBJECTS))
    place %= len(answer.said) + 1
    said = f"{answer.said[:place]}{WORD}{answer.said[place:]}"
    note(said)
    found = find(answer._replace(said=said), cut(said, at))
    assert WORD in found.reasoning + found.content + str(found.calls)
