"""Numbers in prose that come from result files: `<!-- value: FILE [min|max|sum|median|geomean] PATH [over PATH] as FORMAT -->1.88<!-- end -->`.

FILE is a result file without its ending (cpu/sparse). PATH names one value: keys separated by dots, `rows[KEY=TEXT; KEY~TEXT]` the rows whose KEY is
(contains) TEXT, `rows[3]` one by its index, `rows[]` all. A path with several values needs min, max, sum, median or geomean; `over` divides by the
value of a second path, or by a number. The runs of a file that is a list are `runs[date=...]`.
FORMAT is Python's (`.2f`, `.0%`). tables.py writes the numbers, with --check it fails if one is not as in the file.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from _record import list_gaps

RESULTS = Path(__file__).parent / "results"
VALUE = re.compile(r"(<!-- value: (\S+) (.+?) as (\S+) -->).*?(<!-- end -->)", re.DOTALL)
_SUMMARIES = {"min": min, "max": max, "sum": sum, "median": statistics.median, "geomean": statistics.geometric_mean}
_PART = re.compile(r"([^.\[\]]+)(?:\[([^\]]*)\])?(?:\.|$)")


class UnknownValue(Exception):
    """A reference that names no value, or several."""


def update(text: str, results: Path = RESULTS) -> str:
    """The text of a page with the numbers of its references as the files have them. Raises UnknownValue with the reference."""
    return VALUE.sub(lambda m: m[1] + format(resolve(results / f"{m[2]}.json", m[3]), m[4]) + m[5], text)


def resolve(path: Path, expression: str) -> float:
    """The value of `[min|max|sum|median|geomean] PATH [over PATH]` in a result file. Raises UnknownValue, also for a file of incomplete origin."""
    if not path.is_file():
        raise UnknownValue(f"there is no result file {path}")
    data = json.loads(path.read_text())
    if gaps := list_gaps(data):
        raise UnknownValue(f"{path.name} is not published: {', '.join(gaps)}")
    data = {"runs": data} if isinstance(data, list) else data
    value, *divisor = (float(p) if re.fullmatch(r"[\d.]+", p) else _value(data, p.strip(), path.name) for p in expression.split(" over "))
    return value / divisor[0] if divisor else value


def _value(data: Any, text: str, name: str) -> float:
    word, _, rest = text.partition(" ")
    summary = _SUMMARIES.get(word)
    found = _select([data], rest if summary else text, name)
    numbers = [v for v in found if isinstance(v, int | float) and not isinstance(v, bool)]
    if not numbers or len(numbers) < len(found):
        raise UnknownValue(f"{name}: {text} names {'no value' if not found else f'{found[0]!r}, which is no number'}")
    if summary is None and len(set(numbers)) > 1:
        raise UnknownValue(f"{name}: {text} names {len(numbers)} values, such as {numbers[:3]}: add a condition, or min, max, median or geomean")
    return float(summary(numbers) if summary else numbers[0])


def _select(values: list[Any], path: str, name: str) -> list[Any]:
    end = 0
    for part in _PART.finditer(path):
        key, condition, end = part[1], part[2], part.end()
        values = [v[key] for v in values if isinstance(v, dict) and key in v]
        if condition is not None:
            values = [row for v in values for row in (v if isinstance(v, list) else v.values()) if isinstance(v, list | dict)]
            by_index = condition.isdigit() and int(condition) < len(values)
            values = [values[int(condition)]] if by_index else [v for v in values if not condition or _fits(v, condition)]
    if end != len(path) or not path or path.endswith("."):
        raise UnknownValue(f"{name}: {path!r} is no path: keys separated by dots, conditions in brackets")
    return values


def _fits(row: Any, condition: str) -> bool:
    """True if a row meets `KEY=TEXT; KEY~TEXT`."""
    if not isinstance(row, dict):
        return False
    for term in condition.split(";"):
        key, kind, text = re.split(r"([=~])", term.strip(), maxsplit=1) if re.search(r"[=~]", term) else (term.strip(), "?", "")
        value = row.get(key.strip())
        if kind == "?" or value is None or (str(value) != text.strip() if kind == "=" else text.strip() not in str(value)):
            return False
    return True
