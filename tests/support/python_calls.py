"""The work of a function as a number that does not depend on the machine or its load."""

import sys
from collections.abc import Callable


def count_calls(run: Callable[[], object]) -> int:
    """Calls of Python functions while `run` runs."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
