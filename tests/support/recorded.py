"""Texts that are recorded under tests/golden: what many networks give must stay as it was. WHET_UPDATE_GOLDEN=1 writes them."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

UPDATE = os.environ.get("WHET_UPDATE_GOLDEN") == "1"


def compare_with_record(path: Path, lines: Iterable[str]) -> None:
    """Compares lines with a recorded file, or writes it. Raises AssertionError."""
    text = "\n".join(lines) + "\n"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"nothing is recorded in {path.name} yet: run this test with WHET_UPDATE_GOLDEN=1"
    recorded = path.read_text()
    assert text == recorded, "\n".join(difflib.unified_diff(recorded.splitlines(), text.splitlines(), "recorded", "now", n=0, lineterm=""))


def rounded(number: float) -> str:
    """Three digits of a number computed in float64, so that every machine gives the same."""
    return f"{float(number) if abs(number) > 1e-9 else 0.0:.3g}"
