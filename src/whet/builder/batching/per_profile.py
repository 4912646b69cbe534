"""An engine of several profiles: each is tuned for its own shapes, then the plans are put together.

As in TensorRT, the layers of a profile run by what was fastest at its opt shapes: fusions, formats, kernels. Profiles that end in the same
network and choices share them. All take the CPU threads of the first: the count belongs to the whole engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.backends import capabilities_of
from whet.builder.config import BuildConfig
from whet.builder.progress import Noting
from whet.engine.plan import EnginePlan
from whet.errors import LockError
from whet.network import network_text

Make = Callable[[BuildConfig, dict[str, Any] | None, Noting], EnginePlan]


def tuned_apart(config: BuildConfig, lock: Mapping[str, Any] | None) -> bool:
    """Whether the build makes a plan for each profile. A lock says so by itself."""
    return len(config.profiles) > 1 if lock is None else "further" in lock


def built_apart(config: BuildConfig, lock: dict[str, Any] | None, make: Make, tell: Noting) -> EnginePlan:
    """The engine of all profiles; `make` builds one of one profile, under its part of the lock. Raises LockError where those are not as many."""
    locks = [None] * len(config.profiles) if lock is None else [lock, *lock["further"]]
    if len(locks) != len(config.profiles):
        raise LockError(f"the lock is of {len(locks)} profiles, {len(config.profiles)} are asked for. Give those that it was saved with.")
    plans: list[EnginePlan] = []
    for k, (profile, part) in enumerate(zip(config.profiles, locks, strict=True)):
        threads = plans[0].threads if plans and capabilities_of(config.backend).workers else config.threads
        with tell.making(f"profile {k}"):
            plans.append(make(dataclasses.replace(config, profiles=(profile,), threads=threads), part, tell))
    return joined(plans)


def joined(plans: Sequence[EnginePlan]) -> EnginePlan:
    """One engine of plans of one profile each: same inputs and outputs, machine and threads."""
    first, *rest = plans
    text = network_text(first.network)
    alike = all(p.choices == first.choices and network_text(p.network) == text for p in rest)
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
        others=[] if alike else [dataclasses.replace(p, machine=described, options=options) for p in rest],
    )


def fitting(inputs: Mapping[str, np.ndarray] | None, config: BuildConfig) -> Mapping[str, np.ndarray] | None:
    """The user's data where the config's one profile takes them, else None."""
    if inputs is None or len(config.profiles) != 1:
        return inputs
    low, _, high = config.profiles[0]
    for name, a in inputs.items():
        if name in low and name in high and not all(x <= d <= y for x, d, y in zip(low[name], np.shape(a), high[name], strict=True)):
            return None
    return inputs
