"""Assembling an engine plan from a network with selected options: choices as data, a memory plan for each profile."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.backends import Backend
from whet.builder.batching.profiles import MAX, bind_profile_symbols, bound_layers
from whet.builder.config import BuildConfig
from whet.builder.memory.planner import Use, plan_memory
from whet.engine.plan import ArenaPlan, Choice, EnginePlan, Profile
from whet.measure.option import Option
from whet.measure.timing_key import format_layer_text
from whet.network import Layer, Network, format_network, substitute
from whet.plugin_packages import list_package_versions
from whet.runtime.kernels import list_library_versions, plan_layer
from whet.tactics import Operand, Signature, count_operand_bytes, view_shifts


class KernelMemory:
    """The memory of planned kernels: layers of equal work with one choice are planned once, also those of several engines that are compared."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self._known: dict[tuple[str, Choice], tuple[Signature, int, Any]] = {}

    def measure(self, layer: Layer, choice: Choice) -> Use:
        """The bytes that a layer reads, writes and needs as scratch, in the formats of its choice."""
        key = (format_layer_text(layer), choice)
        if key not in self._known:
            planned = plan_layer(layer, choice, self.backend)
            self._known[key] = planned.signature, planned.kernel.scratch, view_shifts(planned.kernel)
        s, scratch, shifts = self._known[key]
        ins = tuple(
            None if t is None or o is None or t.is_constant else (t.name, count_operand_bytes(t, o))
            for t, o in zip(layer.inputs, s.inputs, strict=True)
        )
        outs = tuple((t.name, count_operand_bytes(t, o)) for t, o in zip(layer.outputs, s.outputs, strict=True))
        return Use(layer.name, ins, outs, tuple(s.inplace), scratch, shifts)


def assemble(
    net: Network,
    chosen: Mapping[str, Option],
    profiles: Sequence[Profile],
    config: BuildConfig,
    source: Network,
    kernels: KernelMemory,
) -> EnginePlan:
    """The engine plan of a lowered network with its reformats in place. Raises MemoryLimitError."""
    backend = kernels.backend
    choices = {layer.name: chosen[layer.name].choice() for layer in net.layers}
    arenas = [plan_arena(net, choices, p, kernels, config.memory_limit) for p in profiles]
    return EnginePlan(
        network=net,
        choices=choices,
        profiles=list(profiles),
        arenas=arenas,
        backend=backend.name,
        machine={**backend.describe(), "libraries": list_library_versions(choices, backend)},
        machine_key=backend.key(),
        threads=backend.threads,
        model_digest=compute_model_digest(source),
        source_weights={n: t.array() for n, t in source.constants.items()},
        quantized_weights=[w for t in source.constants.values() if (w := t.constant()).origin.op == "QuantizeLinear"],
        plugins=list_package_versions(_iterate_ops(net), (c.tactic for c in choices.values())),
    )


def _iterate_ops(net: Network) -> Iterator[str]:
    """The ops of all layers, those of regions included."""
    for layer in net.layers:
        yield layer.op
        for region in layer.regions.values():
            yield from _iterate_ops(region)


def make_sample_parallel(base: EnginePlan, profiles: Sequence[Profile], backend: Backend, concurrent_samples: int | None = None) -> EnginePlan:
    """An engine for batches that runs `base`, an engine of one sample, for each sample. `concurrent_samples` run at once (default: as many as there
    are threads and samples); with 1, all threads share each sample."""
    count = max(min(backend.threads, profiles[0].shapes[base.network.inputs[0].name][2][0]), 1) if concurrent_samples is None else concurrent_samples
    arenas = [dataclasses.replace(a, concurrent_samples=count) for a in base.arenas]
    described = {**backend.describe(), "libraries": base.machine.get("libraries", {})}
    return dataclasses.replace(
        base, profiles=list(profiles), arenas=arenas, machine=described, machine_key=backend.key(), threads=backend.threads, probe={},
    )  # fmt: skip


def plan_arena(net: Network, choices: Mapping[str, Choice], profile: Profile, kernels: KernelMemory, limits: Mapping[str, int]) -> ArenaPlan:
    """The memory plan of one profile, sized for its max shapes."""
    env = bind_profile_symbols(net, profile, MAX)
    layers = bound_layers(net, env)
    uses = [kernels.measure(layers[layer.name], choices[layer.name]) for layer in net.layers]
    inputs = {}
    for t in net.inputs:
        shape = tuple(substitute(d, env) for d in t.shape)
        operand = Operand("linear", t.dtype)
        inputs[t.name] = int(count_operand_bytes(type(t)(t.name, t.type.with_shape(shape)), operand))
    return plan_memory(uses, inputs, [t.name for t in net.outputs], limits=limits)


def compute_model_digest(source: Network) -> str:
    """SHA-256 of the source network: its text, which names every weight's contents."""
    return hashlib.sha256(format_network(source).encode()).hexdigest()
