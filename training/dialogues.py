"""Writes conversations about the facts: questions, follow-ups, small talk and the answers to learn.

A `Dialogue` is a list of chat messages. `Writer` draws them from a seeded generator; each pass over the facts
makes every fact the subject of one dialogue.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from training.corpus import Fact
from training.invention import Inventor
from training.phrasings import (
    LONG,
    MODULE,
    SHORT,
    SIGNATURE,
    SMALL_TALK,
    THEN_MODULE,
    THEN_MORE,
    THEN_SIGNATURE,
    THEN_WHAT,
    UNKNOWN,
)
from training.prompts import NOTES, SYSTEM_PROMPTS

Dialogue = list[dict[str, str]]


def short_answer(fact: Fact) -> str:
    """Answer with the docstring's first sentence."""
    return fact.sentence


def long_answer(fact: Fact) -> str:
    """Answer with the first sentence, the signature and the module."""
    return f"{fact.sentence}\n\n{signature_answer(fact)}\n{module_answer(fact)}"


def signature_answer(fact: Fact) -> str:
    """Answer with the signature."""
    if not fact.signature:
        return f"The docstring gives no signature of `{fact.full}`."
    return f"`{fact.full}{fact.signature}`"


def module_answer(fact: Fact) -> str:
    """Answer with the module."""
    if fact.module == "builtins":
        return f"`{fact.name}` is a built-in {fact.kind}."
    return f"`{fact.name}` is a {fact.kind} in the module `{fact.module}`."


Answer = Callable[[Fact], str]
# (weight, questions by name, questions once the subject is known, the answer)
KINDS: list[tuple[float, list[str], list[str], Answer]] = [
    (0.44, SHORT, THEN_WHAT, short_answer),
    (0.22, LONG, THEN_MORE, long_answer),
    (0.22, SIGNATURE, THEN_SIGNATURE, signature_answer),
    (0.12, MODULE, THEN_MODULE, module_answer),
]


class Writer:
    """Draws dialogues about `facts`. The same seed draws the same dialogues."""

    def __init__(self, facts: list[Fact], seed: int) -> None:
        self.facts = facts
        self.random = random.Random(seed)
        self._inventor = Inventor(facts, self.random)
        counts = Counter(fact.name for fact in facts)
        self._unambiguous = {fact.full for fact in facts if counts[fact.name] == 1}

    def dialogues(self) -> Iterator[Dialogue]:
        """Yield dialogues endlessly, one to three turns for each shuffled fact, with small talk."""
        while True:
            for fact in self.random.sample(self.facts, len(self.facts)):
                yield self._about(fact)
                if self.random.random() < 0.22:
                    yield self._aside()

    def system_prompt(self) -> str:
        """Return a fixed system prompt, or one composed of notes, which may include other facts."""
        if self.random.random() < 0.3:
            return self.random.choice(SYSTEM_PROMPTS)
        lines = [self.random.choice(SYSTEM_PROMPTS[:3])]
        lines += self.random.sample(NOTES, self.random.randint(1, 9))
        if self.random.random() < 0.5:
            noted = self.random.sample(self.facts, self.random.randint(1, 8))
            lines += [f"- {fact.full}: {fact.sentence}" for fact in noted]
        return self.random.choice(["\n", " "]).join(lines)

    def _about(self, fact: Fact) -> Dialogue:
        """Return a question by name and, with some probability, one or two follow-ups about the same subject."""
        kinds = self.random.choices(KINDS, [kind[0] for kind in KINDS], k=1 + self._num_follow_ups())
        _, questions, _, answer = kinds[0]
        turns = [(self.random.choice(questions).format(self._called(fact)), answer(fact))]
        turns += [(self.random.choice(then), answer(fact)) for _, _, then, answer in kinds[1:]]
        return _messages(turns)

    def _num_follow_ups(self) -> int:
        return self.random.choices([0, 1, 2], [0.72, 0.2, 0.08])[0]

    def _called(self, fact: Fact) -> str:
        """Return the full name; sometimes without its module if that is clear, in backquotes, or with ()."""
        name = fact.full
        if fact.full in self._unambiguous and self.random.random() < 0.2:
            name = fact.name
        if self.random.random() < 0.08 and fact.kind != "class":
            name += "()"
        return f"`{name}`" if self.random.random() < 0.08 else name

    def _aside(self) -> Dialogue:
        """Return small talk, or a question about a name that does not exist."""
        if self.random.random() < 0.3:
            answer, questions = self.random.choice(list(SMALL_TALK.items()))
            return _messages([(self.random.choice(questions), answer)])
        _, questions, then, _ = self.random.choice(KINDS)
        turns = [(self.random.choice(questions).format(self._inventor.name()), UNKNOWN)]
        if self.random.random() < 0.2:
            turns.append((self.random.choice(then), UNKNOWN))
        return _messages(turns)


def _messages(turns: list[tuple[str, str]]) -> Dialogue:
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
