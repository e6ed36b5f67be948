"""Write the pages that quote figures: each figure is looked up in its file in benchmarks/results.

    python -m benchmarks.report            # writes docs/benchmarks.md and the figures in README.md
    python -m benchmarks.report --check    # writes nothing; exits with 1 when a page differs

The sentences and tables are templates in benchmarks/report_templates, in which a result file is a variable of the
same name: `{{ chaos.requests }}` is the key `requests` of results/chaos.json. A name that no file has is an error,
so a figure disappears with its file and changes with it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
TEMPLATES = ROOT / "benchmarks/report_templates"
PAGE = ROOT / "docs/benchmarks.md"
README = ROOT / "README.md"
_HEADLINES = re.compile(r"(<!-- figures: [^>]*-->\n).*?(<!-- end of figures -->)", re.DOTALL)


def main() -> None:
    """Write the pages, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page differs")
    check = parser.parse_args().check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs, run python -m benchmarks.report' if check else 'written'}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    sys.exit(bool(check and stale))


def pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    headlines = render("headlines.md.jinja")
    readme, found = _HEADLINES.subn(lambda match: match[1] + headlines + match[2], README.read_text("utf-8"))
    if found != 1:
        raise ValueError(
            f"{README.name} must mark once where its figures go, with <!-- figures: ... -->, not {found} times"
        )
    return {PAGE: render("benchmarks.md.jinja"), README: readme}


def render(template: str) -> str:
    """Fill in a template. Raises jinja2.UndefinedError when a figure is in no result file."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        digits=digits, median=statistics.median, percent=percent, row=row, tera=tera, times=times
    )
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return re.sub(r"\n{3,}", "\n\n", environment.get_template(template).render(results)).lstrip()


def digits(value: float, count: int = 3) -> str:
    """Write a number with `count` significant digits, and all places of its whole part."""
    if value == 0:
        return "0"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(places, 0)}f}"


def percent(share: float, places: int = 0) -> str:
    """Write a share, such as 0.829, in percent."""
    return f"{100 * share:.{places}f} %"


def tera(value: float, count: int = 2) -> str:
    """Write a number of bytes or operations in 10^12 of them."""
    return digits(value / 1e12, count)


def times(ratio: float, count: int = 2) -> str:
    """Write a ratio, such as 1.47, as a multiple."""
    return f"{digits(ratio, count)}\N{MULTIPLICATION SIGN}"


def row(rows: Iterable[Mapping[str, Any]], /, **wanted: Any) -> Mapping[str, Any]:
    """Return the only row whose keys have these values. Raises ValueError if there is none, or another."""
    found = [one for one in rows if all(one[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}, expected one: correct the template or the result file")
    return found[0]


if __name__ == "__main__":
    main()
