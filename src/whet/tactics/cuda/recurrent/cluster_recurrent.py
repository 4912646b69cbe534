"""LSTM, GRU and RNN with constant weights on clusters of thread blocks (Hopper), which keep the recurrent weights on chip for all steps.

The inputs of all steps are multiplied at once on tensor cores. Then a cluster per direction and group of sequences runs the steps. A block has some
of the hidden units and sends their next states to the shared memory of all blocks.

Measured: benchmarks/results/h100/networks.json (CRNN). Layers of fewer units than a GPU has run are left to `recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, static_shape
from whet.tactics._base import Args, Config, Packed, PlanRefused, Signature, tactic
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstIntPointer, ConstPointer, FloatPointer, Pointer
from whet.tactics.cuda._device.kernel import (
    RTOL,
    TYPE,
    GpuKernel,
    compile_ahead,
    count_blocks,
    get_shared_limit,
    launch,
    machine_has,
    make_packed_array,
)
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.recurrent._recurrent import ACTIVATIONS, GATES, RecurrentTactic, has_peepholes, list_activation_names, make_cell_constants

_CLUSTERS = (2, 4, 8, 16)  # st.async needs a launch with clusters
_TILES = (1, 2, 4)  # of a warp
_COLUMNS = (1, 2, 4)  # groups of four sequences of a cluster
_FEWEST_UNITS = 128  # of a layer that a GPU has run
_MOST_WARPS, _MOST_CONFIGS = 16, 8
MOST_REGISTERS = 255  # of a thread; weights that do not fit are in shared memory
_BARRIERS = 128  # bytes of shared memory
_BOUNDED = frozenset({"sigmoid", "tanh", "hardsigmoid", "softsign"})
_LARGEST_WEIGHT = 2.0**15  # f32 weights are split into values of f16
#: for 16-bit results: off by at most 3e-7
_FAST = {**ACTIVATIONS, "sigmoid": ("sigmoid(x)", ()), "tanh": ("2.f * sigmoid(2.f * x) - 1.f", ())}
_FEW_POSITIONS = 64  # up to here blocks of the first product divide the inputs, and take fewer rows


@dataclass(frozen=True, kw_only=True)
class ClusterRecurrentArguments(Arguments, kernel="cluster_recurrent.cu"):
    """Arguments of cluster_recurrent.cu; 0 for an absent input."""

    x: ConstPointer
    w: ConstPointer  # f32: [direction][input][row]; 16 bits: [direction][row][input], inputs filled up to a multiple of 32. Rows are [unit][slot]
    r: ConstPointer  # [direction][tile][part][16 units][lane][8 values]: fragments of mma.sync
    bias: ConstFloatPointer  # [direction][row]
    peepholes: ConstFloatPointer
    lengths: ConstIntPointer
    first_h: ConstPointer
    first_c: ConstPointer
    projected: FloatPointer  # [direction][step][sequence][row]
    y: Pointer
    last_h: Pointer
    last_c: Pointer


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a layer."""

    directions: int
    steps: int
    sequences: int
    inputs: int
    units: int
    parts: int  # 16-bit values of a weight
    states: int  # buffers of h

    @property
    def tiles(self) -> int:
        """Tiles of four units."""
        return -(-self.units // 4)

    @property
    def rows(self) -> int:
        """Rows of the weights of a direction: four slots per unit."""
        return self.tiles * 16

    @property
    def depth(self) -> int:
        """Steps of 16 units of a product with h."""
        return -(-self.tiles // 4)


@dataclass(frozen=True)
class Distribution:
    """Distribution of a direction to a cluster: blocks, warps of a block, tiles of a warp, groups of four sequences."""

    cluster: int
    warps: int
    tiles: int
    columns: int

    def in_registers(self, sizes: _Sizes) -> int:
        """Steps of 16 units with weights in registers."""
        available = min(MOST_REGISTERS, 65536 // (self.warps * 32) // 8 * 8)
        products = self.tiles * self.columns
        used = 64 + products * (4 * max(1, 4 // products) + 9)
        return max(0, min(sizes.depth, (available - used) // (4 * self.tiles * sizes.parts)))

    def shared(self, sizes: _Sizes) -> int:
        """Bytes of shared memory of a block; mirrors cluster_recurrent.cu."""
        pitch = (sizes.depth | 1) * 64
        weights = self.warps * self.tiles * sizes.parts * (sizes.depth - self.in_registers(sizes)) * 512
        return _BARRIERS + sizes.states * 4 * self.columns * pitch + weights

    def clusters(self, sizes: _Sizes) -> int:
        """Clusters of a launch."""
        return sizes.directions * -(-sizes.sequences // (4 * self.columns))

    def fits(self, sizes: _Sizes, limit: int) -> bool:
        """True if the kernel supports this distribution: a block's units fit its shared memory, and each block has some."""
        known = self.cluster in _CLUSTERS and self.tiles in _TILES and self.columns in _COLUMNS and 1 <= self.warps <= _MOST_WARPS
        own = self.warps * self.tiles
        return known and (self.cluster - 1) * own < sizes.tiles <= self.cluster * own and self.shared(sizes) <= limit


def why_not_run(layer: Layer, signature: Signature) -> str | None:
    """Why a layer is left to `recurrent`: no GPU has run the kernel for so few units."""
    units = get_sizes(layer, signature).units
    return None if units >= _FEWEST_UNITS else f"{layer.op} of {units} units: verified on a GPU from {_FEWEST_UNITS} units on"


@tactic
class ClusterRecurrent(RecurrentTactic):
    """Weights in registers and shared memory; products on tensor cores with h as the sum of two 16-bit values."""

    def refuses(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        return why_not_run(layer, signature) or self.why_unfit(layer, signature, backend)

    def why_unfit(self, layer: Layer, signature: Signature, backend: Backend) -> str | None:
        """Why the kernel does not take the layer; None: `plan` takes it, even if `refuses` does not offer it."""
        if not machine_has(backend, "wgmma"):
            return "needs Hopper's clusters (sm_90)"
        sizes = get_sizes(layer, signature)
        if not prod((sizes.directions, sizes.steps, sizes.sequences, sizes.units, sizes.inputs)):
            return "the layer is empty"
        if sizes.parts == 2 and (reason := _exceeds_f16(layer)):
            return reason
        if sizes.tiles < _CLUSTERS[0]:
            return "takes more than four units: a cluster has at least two blocks, each with some of them"
        if _list_distributions(sizes, backend):
            return None
        return f"no cluster of {_CLUSTERS[-1]} blocks holds the recurrent weights of {sizes.units} units"

    def configs(self, layer: Layer, signature: Signature, backend: Backend) -> Sequence[Config]:
        sizes = get_sizes(layer, signature)
        found = _list_distributions(sizes, backend)
        compile_ahead(backend, [emit_kernel_source("cluster_recurrent.cu", make_macros(layer, signature, sizes, x)) for x in found])
        return [tuple(asdict(x).items()) for x in found]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GpuKernel:
        sizes, distribution = get_sizes(layer, signature), Distribution(**{k: int(v) for k, v in config})
        if not distribution.fits(sizes, get_shared_limit(backend)):
            raise PlanRefused(f"{distribution} does not hold {sizes.units} units")
        kind, holes = signature.outputs[0].dtype, has_peepholes(layer)
        constants = make_macros(layer, signature, sizes, distribution)
        packed = [_pack_inputs(layer, kind, sizes), _pack_recurrent(layer, kind, sizes), _pack_bias(layer, sizes)]
        if holes:
            peepholes = layer.needs(7)
            key = f"{peepholes.constant().digest}|recurrent f32"
            packed.append(make_packed_array(key, sizes.directions * 3 * sizes.units * 4, lambda: np.asarray(peepholes.array(), np.float32)))
        places = sizes.steps * sizes.sequences
        rows = sizes.directions * sizes.rows
        if sizes.parts == 2:
            grid, threads = (count_blocks(rows, 128), count_blocks(places, 8), 1), 128
        else:
            row_warps, k_warps, positions = _select_product_split(sizes)
            grid, threads = (count_blocks(rows, 16 * row_warps), count_blocks(places, 8 * positions), 1), 32 * row_warps * k_warps

        def make(args: Args) -> list:
            given = (*args.inputs, *(0,) * 8)
            last = (*args.outputs[1:], 0, 0)
            arguments = ClusterRecurrentArguments(
                x=given[0], w=args.packed[0], r=args.packed[1], bias=args.packed[2], peepholes=args.packed[3] if holes else 0, lengths=given[4],
                first_h=given[5], first_c=given[6] if layer.op == "LSTM" else 0, projected=args.scratch, y=args.outputs[0], last_h=last[0],
                last_c=last[1],
            )  # fmt: skip
            blocks = distribution.clusters(sizes) * distribution.cluster
            return [
                launch("project", arguments, constants, grid, threads, label=layer.name),
                launch(
                    "recur", arguments, constants, (blocks, 1, 1), distribution.warps * 32,
                    shared=distribution.shared(sizes), cluster=distribution.cluster, label=layer.name,
                ),
            ]

        # the state stays f32 over all steps, since rounding would accumulate; results are rounded once
        rtol = max(RTOL[kind.name], 4 * RTOL["f32"])
        name = f"steps of a cluster of {distribution.cluster} w{distribution.warps} t{distribution.tiles} n{distribution.columns * 4}"
        return GpuKernel(layer, signature, make, implementation=name, packed=packed, scratch=places * rows * 4, rtol=rtol)


def get_sizes(layer: Layer, signature: Signature) -> _Sizes:
    """The sizes of a recurrent layer."""
    x, (directions, _, units) = static_shape(layer.needs(0).shape), static_shape(layer.needs(2).shape)
    steps, sequences = (x[1], x[0]) if layer.attrs["layout"] else (x[0], x[1])
    twice = layer.op == "GRU" and not layer.attrs.get("linear_before_reset")
    return _Sizes(directions, steps, sequences, x[2], units, 2 if signature.outputs[0].dtype.name == "f32" else 1, 3 if twice else 2)


def _exceeds_f16(layer: Layer) -> str | None:
    """Reason why states or recurrent weights in f32 may exceed the range of f16."""
    if not _BOUNDED.issuperset(list_activation_names(layer)):
        return "multiplies states in f32 only if its activations are bounded"
    first, weights = layer.input(5), layer.needs(2)
    if first is not None and (not first.is_constant or np.abs(first.array()).max(initial=0) > _LARGEST_WEIGHT):
        return "multiplies states in f32 only if the first ones are constants"
    largest = float(np.abs(weights.array()).max(initial=0))
    return None if largest <= _LARGEST_WEIGHT else f"the recurrent weights reach {largest:g}; takes up to {_LARGEST_WEIGHT:g} in f32"


def _select_product_split(sizes: _Sizes) -> tuple[int, int, int]:
    """Warps of a block along rows and along inputs, and groups of eight positions, of the product with the inputs."""
    return (1, 4, 4) if sizes.steps * sizes.sequences <= _FEW_POSITIONS else (4, 1, 8)


def make_macros(layer: Layer, signature: Signature, sizes: _Sizes, distribution: Distribution) -> dict[str, Any]:
    """The macros of an instance."""
    kind = signature.outputs[0].dtype.name
    row_warps, k_warps, positions = _select_product_split(sizes)
    return {
        "DIRECTIONS": sizes.directions, "STEPS": sizes.steps, "SEQUENCES": sizes.sequences, "INPUTS": sizes.inputs, "UNITS": sizes.units,
        "TYPE": TYPE[kind], "BF16": int(kind == "bf16"), "CLUSTER": distribution.cluster, "WARPS": distribution.warps,
        "TILES": distribution.tiles, "COLUMNS": distribution.columns, "IN_REGISTERS": distribution.in_registers(sizes),
        "ROW_WARPS": row_warps, "K_WARPS": k_warps, "POSITIONS": positions,
        **make_cell_constants(layer, ACTIVATIONS if kind == "f32" else _FAST),
    }  # fmt: skip


def _list_distributions(sizes: _Sizes, backend: Backend) -> list[Distribution]:
    """Distributions that fit, the most promising first."""
    found: dict[Distribution, float] = {}
    for cluster in _CLUSTERS:
        own = -(-sizes.tiles // cluster)
        for tiles in _TILES:
            for columns in _COLUMNS:
                distribution = Distribution(cluster, -(-own // tiles), tiles, columns)
                if distribution.fits(sizes, get_shared_limit(backend)) and (columns == 1 or 2 * columns < sizes.sequences):
                    found[distribution] = _estimate(sizes, distribution, backend.capabilities.multiprocessors)
    return sorted(found, key=lambda w: (found[w], w.cluster, w.warps))[:_MOST_CONFIGS]


def _estimate(sizes: _Sizes, distribution: Distribution, multiprocessors: int) -> float:
    """Rough cycles of a step, which only order candidates: products of a scheduler or their latency, weights from shared memory, exchange."""
    products = distribution.tiles * distribution.columns * sizes.parts * sizes.depth
    tensor = max(-(-distribution.warps // 4) * products * 8, products * 33 / max(4, distribution.tiles * distribution.columns))
    weights = distribution.warps * distribution.tiles * sizes.parts * (sizes.depth - distribution.in_registers(sizes)) * 512 / 128
    exchange = 700 + 10 * distribution.cluster
    cells = distribution.tiles * distribution.columns * 120
    turns = -(-distribution.clusters(sizes) * distribution.cluster // multiprocessors)
    return turns * (max(tensor, weights) + exchange + cells)


def _by_slot(layer: Layer, sizes: _Sizes, array: np.ndarray) -> np.ndarray:
    """[direction, gate * units, ...] as [direction, tile, unit of 4, slot of 4, ...], with zeros for slots without a gate."""
    rest = array.shape[2:]
    gates = array.reshape(sizes.directions, GATES[layer.op], sizes.units, *rest)
    full = np.zeros((sizes.directions, sizes.tiles * 4, 4, *rest), np.float32)
    full[:, : sizes.units, : GATES[layer.op]] = np.moveaxis(gates, 1, 2)
    return full.reshape(sizes.directions, sizes.tiles, 4, 4, *rest)


def _pack_inputs(layer: Layer, kind: DType, sizes: _Sizes) -> Packed:
    """W for `project`."""
    w = layer.needs(1)
    transposed = sizes.parts == 2
    columns = sizes.inputs if transposed else -(-sizes.inputs // 32) * 32

    def make() -> np.ndarray:
        rows = _by_slot(layer, sizes, np.asarray(w.array(), np.float32)).reshape(sizes.directions, sizes.rows, sizes.inputs)
        if transposed:
            return np.ascontiguousarray(rows.transpose(0, 2, 1))
        full = np.zeros((sizes.directions, sizes.rows, columns), np.float32)
        full[:, :, : sizes.inputs] = rows
        return full.astype(kind.numpy)

    key = f"{w.constant().digest}|cluster recurrent inputs {layer.op} {kind}"
    return make_packed_array(key, sizes.directions * sizes.rows * columns * kind.numpy.itemsize, make)


def _pack_recurrent(layer: Layer, kind: DType, sizes: _Sizes) -> Packed:
    """R as fragments: a lane has rows lane / 4 and that + 8, and units 4 * (lane % 4) to + 3 of each 16."""
    r = layer.needs(2)

    def make() -> np.ndarray:
        tiles = _by_slot(layer, sizes, np.asarray(r.array(), np.float32)).transpose(0, 1, 3, 2, 4)  # [direction, tile, slot, unit, from unit]
        full = np.zeros((sizes.directions, sizes.tiles, 16, sizes.depth * 16), np.float32)
        full[..., : sizes.units] = tiles.reshape(sizes.directions, sizes.tiles, 16, sizes.units)
        half = np.dtype(np.float16) if sizes.parts == 2 else kind.numpy
        parts = [full.astype(half)]
        if sizes.parts == 2:
            parts.append((full - parts[0].astype(np.float32)).astype(half))
        values = np.stack(parts, axis=2)  # [direction, tile, part, 8 * upper + row, 16 * step + 4 * quarter + 2 * pair + one]
        split = values.reshape(sizes.directions, sizes.tiles, sizes.parts, 2, 8, sizes.depth, 4, 2, 2)
        return split.transpose(0, 1, 2, 5, 4, 6, 7, 3, 8)  # [..., step, row, quarter, pair, upper, one]

    key = f"{r.constant().digest}|cluster recurrent {layer.op} {kind}"
    return make_packed_array(key, sizes.directions * sizes.tiles * sizes.parts * sizes.depth * 512, make)


def _pack_bias(layer: Layer, sizes: _Sizes) -> Packed:
    """The sum of both biases; a GRU that multiplies the product of h by r adds its recurrent bias first, from the free slot."""
    bias = layer.input(3)
    apart = layer.op == "GRU" and sizes.states == 2

    def make() -> np.ndarray:
        if bias is None:
            return np.zeros((sizes.directions, sizes.rows), np.float32)
        of_w, of_r = np.split(np.asarray(bias.array(), np.float32), 2, axis=1)
        by_w, by_r = _by_slot(layer, sizes, of_w), _by_slot(layer, sizes, of_r)
        total = by_w + by_r
        if apart:
            total[..., 2], total[..., 3] = by_w[..., 2], by_r[..., 2]
        return total

    digest = "zeros" if bias is None else bias.constant().digest
    key = f"{digest}|cluster recurrent bias {layer.op} {apart} {sizes.units}"
    return make_packed_array(key, sizes.directions * sizes.rows * 4, make)
