"""What samples of one thing's time say: its typical value, and by how much the middle of them varies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def in_row(machine: Any, executables: Sequence[Any]) -> list[float]:
    """Seconds of one run of each executable, by the machine's clock.

    On a GPU they are started one behind the other: around a launch by itself its clock counts the microseconds that the host takes to launch,
    which are as many as a small network's layer takes, differ from run to run, and weigh more the fewer launches a sample has.
    """
    if hasattr(machine, "seconds_in_row"):
        return list(machine.seconds_in_row(executables))
    return [machine.seconds(executable, 1)[0] for executable in executables]


def typical(samples: Sequence[float], disturbed: bool) -> float:
    """The median; where other programs took the CPUs, the lower quartile: a sample that was interrupted says nothing about the kernel."""
    return sorted(samples)[(len(samples) - 1) // 4] if disturbed else median(samples)


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles: what the middle of the samples varies by."""
    s = sorted(samples)
    return (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2
