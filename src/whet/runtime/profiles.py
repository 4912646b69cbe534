"""Selects the profile for given shapes: among those that accept them, the one tuned for the nearest shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, log, prod

from whet.engine.plan import EnginePlan, Profile

Shapes = Mapping[str, tuple[int, ...]]


def takes(profile: Profile, shapes: Shapes) -> bool:
    """True if every shape is between the profile's min and max, along each axis."""
    return all(
        len(shape) == len(low) and all(a <= d <= b for a, d, b in zip(low, shape, high, strict=True))
        for name, shape in shapes.items()
        for low, _, high in [profile.shapes.get(name, (shape, shape, shape))]
    )


def find_nearest_profile(plan: EnginePlan, shapes: Shapes) -> int | None:
    """The profile for shapes of all inputs: its opt shapes differ by the smallest factors (ties: first). None if no profile accepts them."""
    fit = [k for k, p in enumerate(plan.profiles) if takes(p, shapes)]
    if not plan.profiles:
        return 0
    return min(fit, key=lambda k: _compute_distance(plan.profiles[k], shapes), default=None)


def compute_size_factor(profile: Profile, shapes: Shapes) -> float:
    """By how much the elements of an input differ from those at the opt shapes, at least 1; the largest factor of all inputs."""
    sizes = [(prod(shape), prod(profile.shapes[name][1])) for name, shape in shapes.items() if name in profile.shapes]
    return max((max(a / b, b / a) for a, b in sizes if a and b), default=1.0)


def _compute_distance(profile: Profile, shapes: Shapes) -> float:
    """The sum over all axes of the logarithm of the factor between shape and opt shape."""
    pairs = [(d, o) for name, shape in shapes.items() if name in profile.shapes for d, o in zip(shape, profile.shapes[name][1], strict=True)]
    return sum(abs(log(d / o)) if d and o else (0.0 if d == o else inf) for d, o in pairs)
