"""Searching for the fastest engine that passes verification: kernels that fail are banned with a reason, and the search is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whet.builder.assemble import KernelMemory, assemble
from whet.builder.explain import record_selection
from whet.builder.lowering import blame_pass
from whet.builder.select.fusion import list_fused_parts, time_unfused
from whet.builder.select.search import Search
from whet.builder.select.whole_engine import BrokenKernel, select_engine
from whet.builder.verify.repeated import verify_once
from whet.builder.verify.verification import ban, ban_failures, ban_nearest, ban_overflows, make_verification_inputs
from whet.engine.plan import EnginePlan, Profile
from whet.errors import VerificationError
from whet.network import Network

_MAX_REBUILDS = 16  # searches, each without the kernels that failed before
_MAX_NETWORK_BANS = 8  # tactics banned because the network's error is too large although each layer is within its bound


def search_verified_engine(search: Search, source: Network, profiles: Sequence[Profile], inputs: Mapping[str, np.ndarray] | None) -> EnginePlan:
    """The fastest engine with the results of `source`, with its report and probe. Raises VerificationError."""
    config, backend, log = search.config, search.backend, search.log
    failure, network_bans, kernels = "", 0, KernelMemory(backend)
    with search:
        for _ in range(_MAX_REBUILDS):
            _time_candidates(search)
            try:
                selected = select_engine(search, lambda net, chosen: assemble(net, chosen, profiles, config, source, kernels))
            except BrokenKernel as e:
                failure = str(e)
                ban(search, e.layer, e.option, failure, log)
                continue
            record_selection(search, selected)
            if not config.verify or not backend.capabilities.executes:
                return selected.plan
            verified = verify_once(selected.plan, source, backend, inputs, config, log)
            verified.complete(selected.plan)
            checked = verified.checked
            if checked is None or not checked.failures:
                return selected.plan
            if any(f.layer for f in checked.failures):
                ban_failures(search, checked, selected, log)
                failure = str(checked.failures[0])
                continue
            if ban_overflows(search, checked, selected.candidate.lowered, selected.plan.network):
                failure = str(checked.failures[0])
                continue
            blamed = blame_pass(source, config, make_verification_inputs(selected.plan, inputs, config), checked.network_bound)
            if blamed or network_bans >= _MAX_NETWORK_BANS or not ban_nearest(search, checked, selected, log):
                rounding = " The graph passes keep the network's result, so it is the sum of many roundings: the network is sensitive to them."
                raise VerificationError(f"{checked.failures[0]}{blamed or rounding}")
            network_bans += 1
    raise VerificationError(
        f"{_MAX_REBUILDS} kernels in a row failed verification, the last of them: {failure}. This machine or a library on it "
        "computes wrongly; --passes=none and --builderOptimizationLevel=0 narrow it down."
    )


def _time_candidates(search: Search) -> None:
    """Lists and times the candidates of all layers, and fused layers against their parts."""
    search.listing.list_all(search.bans.reason)
    list_fused_parts(search)
    search.time_all()
    if not search.cannot_win(search.compute_least_ms()):
        time_unfused(search)
