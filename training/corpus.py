"""Collects the facts that the embedded model learns: the standard library's public names and their docstrings.

    inspect ──harvest()──▶ facts.json (committed) ──load_facts()──▶ dialogues, training, evaluation

Docstrings differ between Python versions, so training and evaluation read the committed file and give the
same result everywhere; `python -m training.corpus` writes it again from the running interpreter.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FACTS = Path(__file__).with_name("facts.json")

MAX_SENTENCE = 200  # characters; longer ones are not worth their training time
MAX_SIGNATURE = 160

# A string instead of a list, which would have one name on each of 109 lines.
MODULES = """
builtins itertools functools collections json os.path math re random statistics heapq bisect operator string
collections.abc copy datetime calendar time os pathlib shutil glob fnmatch tempfile io fileinput csv
configparser pickle shelve zlib gzip bz2 lzma zipfile tarfile hashlib hmac secrets base64 binascii struct
codecs textwrap difflib unicodedata pprint reprlib enum types typing dataclasses abc contextlib weakref gc
inspect traceback warnings logging argparse getopt getpass shlex subprocess signal threading multiprocessing
concurrent.futures queue sched asyncio socket select http.client urllib.parse urllib.request email.utils
html html.parser xml.etree.ElementTree sqlite3 uuid ipaddress decimal fractions cmath numbers array locale
platform sys importlib timeit cProfile tracemalloc unittest unittest.mock mimetypes wave graphlib zoneinfo
plistlib tomllib stat filecmp linecache atexit
""".split()  # noqa: SIM905

# Large modules from which only functions and classes are taken, not the classes' methods.
WITHOUT_METHODS = frozenset(
    """asyncio calendar codecs collections.abc configparser decimal email.utils http.client inspect io locale
    logging multiprocessing numbers os random shelve signal socket sqlite3 tarfile threading tracemalloc types
    unittest unittest.mock urllib.request zoneinfo""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Fact:
    """One public name of the standard library and the content of its docstring."""

    module: str  # "itertools"
    name: str  # qualified inside the module: "chain", "chain.from_iterable"
    kind: str  # "function", "method" or "class"
    signature: str  # "(*iterables)"; empty if Python does not know it
    sentence: str  # the docstring's first sentence, on one line

    @property
    def full(self) -> str:
        """The name as it is written after `import module`."""
        return self.name if self.module == "builtins" else f"{self.module}.{self.name}"


def load_facts(path: Path = FACTS) -> list[Fact]:
    """Return the committed facts in their order."""
    return [Fact(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def save_facts(facts: list[Fact], path: Path = FACTS) -> None:
    """Write one fact per line, so that a diff shows which facts changed."""
    rows = ",\n".join(json.dumps(asdict(fact), separators=(",", ":")) for fact in facts)
    path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


def harvest(modules: Sequence[str] = MODULES) -> list[Fact]:
    """Return all usable facts of `modules` in their order: functions and classes by name, then the methods.

    The same sentence for the same last name (`bytes.upper`, `bytearray.upper`) counts once per module.
    """
    facts: dict[tuple[str, str, str], Fact] = {}
    for module_name in modules:
        for name, kind, thing in _members(importlib.import_module(module_name)):
            fact = _fact(module_name, name, kind, thing)
            if fact is not None:
                facts.setdefault((module_name, name.rpartition(".")[2], fact.sentence), fact)
    return list(facts.values())


def _members(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    exported = getattr(module, "__all__", None)
    names = sorted(name for name in exported or vars(module) if not name.startswith("_"))
    things = {name: getattr(module, name, None) for name in names}
    classes = {name: thing for name, thing in things.items() if _is_class(name, thing)}
    for name, thing in things.items():
        if name in classes and (exported or _is_own(module, thing)):
            yield name, "class", thing
        elif inspect.isroutine(thing) and (exported or _is_own(module, thing)):
            yield name, "function", thing
    for name, cls in classes.items():
        if module.__name__ not in WITHOUT_METHODS and (exported or _is_own(module, cls)):
            yield from _methods(name, cls)


def _is_class(name: str, thing: Any) -> bool:
    """Return whether `thing` is a class of this name, not an alias such as IOError."""
    return inspect.isclass(thing) and thing.__name__ == name


def _is_own(module: ModuleType, thing: Any) -> bool:
    owner = getattr(thing, "__module__", None) or ""
    return owner.lstrip("_") in (module.__name__, "posix", "thread", "posixsubprocess")


def _methods(class_name: str, cls: Any) -> Iterator[tuple[str, str, Any]]:
    for name, thing in sorted(vars(cls).items()):
        if isinstance(thing, classmethod | staticmethod):
            thing = thing.__func__
        if not name.startswith("_") and inspect.isroutine(thing):
            yield f"{class_name}.{name}", "method", thing


def _fact(module: str, name: str, kind: str, thing: Any) -> Fact | None:
    doc = thing.__doc__
    if not isinstance(doc, str):
        return None
    described, sentence = _split(inspect.cleandoc(doc))
    usable = sentence.isascii() and sentence.isprintable() and 12 <= len(sentence) <= MAX_SENTENCE
    if not usable or " " not in sentence or "<" in sentence or sentence.startswith("Deprecated"):
        return None
    if sentence.count("(") != sentence.count(")"):  # a call that was cut after its first line
        return None
    signature = _signature(thing, kind) or described
    return Fact(module, name, kind, signature if len(signature) <= MAX_SIGNATURE else "", sentence)


# `chain(*iterables) --> chain object`, but not `D.pop(k[,d]) -> v, remove specified key and return ...`
_CALL = re.compile(r"^[\w.]+(\([^()]*\))(\s*--?>(?!.*, \w+ \w+).*|\s*=.*)?$")


def _split(doc: str) -> tuple[str, str]:
    """Return (signature, first sentence). C docstrings may begin with `chain(*iterables) --> chain object`."""
    lines = doc.splitlines()
    call = _CALL.match(lines[0]) if lines else None
    rest = lines
    while rest and (_CALL.match(rest[0]) or not rest[0].strip()):
        rest = rest[1:]
    if not rest or rest[0].startswith(" "):  # nothing but calls, such as `dict() -> new empty dictionary`
        rest = lines[:1]
    text = " ".join("\n".join(rest).split("\n\n")[0].split())
    end = re.search(r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)(?<!\.)[.!?](?=\s)", text)
    return (call.group(1) if call else ""), (text[: end.end()] if end else text)


_PATH = re.compile(r"=['\"](/|[A-Z]:)\w")


def _signature(thing: Any, kind: str) -> str:
    """Return the call's parentheses without annotations and self; empty if Python does not know them."""
    try:
        signature = inspect.signature(thing)
    except (ValueError, TypeError):
        return ""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    if kind == "method" and parameters and parameters[0].name in ("self", "cls", "type"):
        parameters = parameters[1:]
    if parameters and kind == "class" and [p.name for p in parameters] == ["args", "kwargs"]:
        return ""
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    if _PATH.search(str(bare)):
        return ""  # the default value depends on the machine
    return re.sub(r"<[^<>]*>", "...", str(bare)) if str(bare).isascii() else ""


def main() -> None:
    """Write facts.json from this interpreter."""
    facts = harvest()
    save_facts(facts)
    print(f"{len(facts)} facts from {len(MODULES)} modules of Python {sys.version.split()[0]} in {FACTS}")


if __name__ == "__main__":
    main()
