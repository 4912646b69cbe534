"""One verification for a choice among several engines: only the kept engine is verified; if it fails, all are built again with verification."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from whet.backends import get_backend
from whet.builder.batching.per_profile import select_inputs
from whet.builder.config import BuildConfig
from whet.builder.progress import Progress, ProgressLog
from whet.builder.verify.repeated import verify_once
from whet.engine.plan import EnginePlan
from whet.network import Network


def build_verified(
    make: Callable[[BuildConfig], EnginePlan],
    source: Callable[[EnginePlan], Network],
    config: BuildConfig,
    progress: Progress | None,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    """The engine that `make` builds for `config`, verified against the source network that `source` returns for it.

    `make` selects among unverified engines. If the selected one fails, `make` is called again with verification on, which bans failing
    kernels from each engine while it is built.
    """
    if not config.verify or config.lock:
        return make(config)
    plan = make(dataclasses.replace(config, verify=False))
    backend = get_backend(config.backend, threads=plan.threads)
    if not backend.capabilities.executes:
        return plan
    log = ProgressLog(progress)
    for k, part in enumerate(plan.by_profile()):
        own = config if not plan.others else dataclasses.replace(config, profiles=config.profiles[k : k + 1])
        verified = verify_once(part, source(plan), backend, select_inputs(inputs, own), own, log)
        if verified.probe is None:
            return make(config)
        verified.complete(plan.part(k)[0])
    plan.report.notes += log.notes
    return plan
