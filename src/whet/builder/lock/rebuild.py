"""Building an engine under a lock: the locked plan, verified like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.builder.batching.per_sample import verify_sample_parallel
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import build_locked_plan
from whet.builder.progress import ProgressLog
from whet.builder.verify.repeated import verify_once
from whet.engine.plan import EnginePlan, Profile
from whet.engine.report import SelectionRecord, Unfused
from whet.errors import VerificationError
from whet.network import Network


def rebuild_locked(
    lock: Mapping[str, Any],
    source: Network,
    lowered: Network,
    profiles: Sequence[Profile],
    backend: Backend,
    config: BuildConfig,
    inputs: Mapping[str, np.ndarray] | None,
    log: ProgressLog,
) -> EnginePlan:
    """The engine that a lock describes, with its probe. Raises LockError if it would be another one, VerificationError if it computes wrongly."""
    plan = build_locked_plan(lock, source, lowered, profiles, backend, config)
    plan.report.choice, plan.report.unfused = SelectionRecord("lock"), [Unfused(n, "locked") for n in lock["unfused"]]
    if not config.verify or not backend.capabilities.executes:
        return plan
    if plan.arenas[0].concurrent_samples:
        failure = verify_sample_parallel(plan, source, backend, config, inputs, log)
    else:
        verified = verify_once(plan, source, backend, inputs, config, log)
        verified.complete(plan)
        failure = next(iter(verified.report.failures), None)
    if failure is not None:
        raise VerificationError(f"the locked engine fails verification: {failure}. Build without --lock.")
    return plan
