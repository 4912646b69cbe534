"""Verifies batches that run per sample: every sample must give the result that it gives alone, for all batch sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.backends import Backend, get_backend
from whet.builder.verify.differences import compare_output
from whet.builder.verify.error_bounds import compute_layer_bound
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.runtime import BoundEngine, WeightStore, bind


def find_batch_difference(plan: EnginePlan, backend: Backend, seed: int = 0) -> str | None:
    """A description of the first difference, or None. The engine of one sample must have been verified on one thread.

    Samples that do not fill all workers run on all threads; there every layer must give its one-thread result within its kernel's bound. Then
    batches are run: each sample's outputs must equal, bit by bit, those of the sample alone, on one thread or on all.
    """
    one, store = plan.of_one_sample(), WeightStore(backend)
    shapes = {n: (1, *s[1:]) for n, s in probe_shapes(plan).items()}
    alone = team = bind(one, backend, shapes, store=store)
    if plan.arenas[0].concurrent_samples > 1 and backend.threads > 1:
        alone = bind(one, get_backend(backend.name, threads=1), shapes, store=store)
        backend.activate()
    if alone is not team and (why := _find_differing_layer(alone, team, one, probe_inputs(one.network, seed, shapes))) is not None:
        return why
    for batch in _list_batch_sizes(plan):
        whole = {n: (batch, *s[1:]) for n, s in shapes.items()}
        data = probe_inputs(plan.network, seed + batch, whole)
        run = bind(plan, backend, whole, store=store)
        run.feed(data)
        run.run()
        got = run.fetch()
        for i in range(batch):
            want = [_copy_outputs(b, data, i) for b in (alone, team)]
            name = next((n for n in got if not any(_is_bit_identical(got[n][i : i + 1], w[n]) for w in want)), None)
            if name is not None:
                return f"sample {i} of a batch of {batch} gives another '{name}' than alone"
    return None


def _list_batch_sizes(plan: EnginePlan) -> list[int]:
    """Batch sizes within the profile: opt, min, 1, and sizes that the number of workers does not divide."""
    low, opt, high = next(iter(plan.profiles[0].shapes.values()))
    workers = plan.arenas[0].concurrent_samples
    sizes = (opt[0], low[0], 1, workers + 1, 2 * workers - 1)
    return [b for b in dict.fromkeys(sizes) if low[0] <= b <= high[0]]


def _copy_outputs(bound: BoundEngine, data: Mapping[str, np.ndarray], i: int) -> dict[str, np.ndarray]:
    bound.feed({n: a[i : i + 1] for n, a in data.items()})
    bound.run()
    return bound.fetch()


def _is_bit_identical(a: np.ndarray, b: np.ndarray) -> bool:
    """True if both have the same bits (NaN equals NaN)."""
    return a.shape == b.shape and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def _find_differing_layer(alone: BoundEngine, team: BoundEngine, plan: EnginePlan, data: Mapping[str, np.ndarray]) -> str | None:
    """The first layer with different outputs on all threads and on one thread for the same inputs, or None."""
    alone.feed(data)
    with np.errstate(all="ignore"):
        for i, (layer, ins, outs) in enumerate(alone.walk()):
            for t, a in zip(layer.inputs, ins, strict=True):
                if t is not None and a is not None and not t.is_constant:
                    team.write_stored(t.name, a)
            team.run_step(i)
            choice = plan.choices[layer.name]
            for t, (_, dtype), want in zip(layer.outputs, choice.outputs, outs, strict=True):
                error, why = compare_output(team.value(t.name), want, t.dtype)
                bound = 2 * compute_layer_bound(layer, choice, dtype) if t.dtype.is_float else 0.0
                if error > bound:
                    difference_text = why or f"by {error:.2g}, allowed is {bound:.2g}"
                    return f"{layer.op} '{layer.name}' by {choice.tactic} differs on {team.backend.threads} threads from one: {difference_text}"
    return None
