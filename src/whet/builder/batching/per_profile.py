"""Engines of several profiles: each profile is tuned for its own shapes, then the plans are joined.

As in TensorRT, fusions, formats and kernels of a profile are those that are fastest at its opt shapes. Profiles with the same network and
choices share them. All profiles use the thread count of the first, since an engine has one count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.backends import get_capabilities
from whet.builder.config import BuildConfig
from whet.builder.progress import ProgressLog
from whet.engine.plan import EnginePlan
from whet.errors import LockError
from whet.network import format_network

Make = Callable[[BuildConfig, dict[str, Any] | None, ProgressLog], EnginePlan]


def has_profile_plans(config: BuildConfig, lock: Mapping[str, Any] | None) -> bool:
    """True if each profile gets its own plan. Under a lock, true if the lock has several plans."""
    return len(config.profiles) > 1 if lock is None else "further" in lock


def build_profiles(config: BuildConfig, lock: dict[str, Any] | None, make: Make, log: ProgressLog) -> EnginePlan:
    """The engine of all profiles. `make` builds the engine of one profile, under its part of the lock.

    Raises LockError if the lock has another number of profiles.
    """
    locks = [None] * len(config.profiles) if lock is None else [lock, *lock["further"]]
    if len(locks) != len(config.profiles):
        raise LockError(f"the lock has {len(locks)} profiles, the build {len(config.profiles)}. Give the profiles that it was saved with.")
    plans: list[EnginePlan] = []
    for k, (profile, part) in enumerate(zip(config.profiles, locks, strict=True)):
        threads = plans[0].threads if plans and get_capabilities(config.backend).workers else config.threads
        with log.prefix_stages(f"profile {k}"):
            plans.append(make(dataclasses.replace(config, profiles=(profile,), threads=threads), part, log))
    return join_plans(plans)


def join_plans(plans: Sequence[EnginePlan]) -> EnginePlan:
    """Joins plans of one profile each, which have the same inputs, outputs, machine and threads, into one engine."""
    first, *rest = plans
    text = format_network(first.network)
    equal = all(p.choices == first.choices and format_network(p.network) == text for p in rest)
    libraries = {k: v for p in plans for k, v in p.machine.get("libraries", {}).items()}
    options = first.options | {"profiles": tuple(q for p in plans for q in p.options.get("profiles", ()))}
    described = first.machine | {"libraries": libraries}
    notes = list(first.report.notes)
    notes += [f"profile {k}: {n}" for k, p in enumerate(rest, 1) for n in p.report.notes if n not in first.report.notes]
    report = dataclasses.replace(first.report, notes=notes, build_seconds=sum(p.report.build_seconds for p in plans))
    return dataclasses.replace(
        first,
        profiles=[q for p in plans for q in p.profiles],
        arenas=[a for p in plans for a in p.arenas],
        machine=described,
        options=options,
        report=report,
        others=[] if equal else [dataclasses.replace(p, machine=described, options=options) for p in rest],
        plugins={k: v for p in plans for k, v in p.plugins.items()},
    )


def select_inputs(inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> Mapping[str, np.ndarray] | None:
    """The user's data if they fit the config's only profile or there are several, else None."""
    if inputs is None or len(config.profiles) != 1:
        return inputs
    low, _, high = config.profiles[0]
    for name, a in inputs.items():
        if name in low and name in high and not all(x <= d <= y for x, d, y in zip(low[name], np.shape(a), high[name], strict=True)):
            return None
    return inputs
