"""The memory plan: an arena offset for each tensor, so that tensors with overlapping live intervals never share a byte.

Inputs and outputs of the network may be users' own buffers, so each has its own range after the shared part. In-place pairs share bytes as
the tactic demands; parts of a Concat, Split or Slice are views of the whole (builder/memory/byte_groups.py). All layers share one scratch range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from whet.builder.memory.byte_groups import Groups
from whet.builder.memory.free_ranges import FreeRanges
from whet.engine.plan import ArenaPlan
from whet.errors import MemoryLimitError
from whet.runtime.memory import align_size

OVERLAPS, OVERLAPS_PER_BLOCK = 1_000_000, 100  # pairs of overlapping blocks that the slower placements may handle


@dataclass(frozen=True)
class Block:
    """A byte range with its live interval: from step `first` (written) to step `last` (last read), both included."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Use:
    """One layer's memory use: operands, in-place pairs, scratch in bytes.

    `inputs` and `outputs` are (tensor name, bytes); None for an operand that is absent or not in the arena. `shifts`: per in-place pair, the byte
    offset of the smaller tensor in the larger (empty: all 0).
    """

    layer: str
    inputs: tuple[tuple[str, int] | None, ...]
    outputs: tuple[tuple[str, int], ...]
    inplace: tuple[tuple[int, int], ...] = ()
    scratch: int = 0
    shifts: tuple[int, ...] = ()


def plan_memory(uses: Sequence[Use], inputs: Mapping[str, int], outputs: Sequence[str], *, limits: Mapping[str, int] | None = None) -> ArenaPlan:
    """Offsets for all tensors of one run; `inputs` are the network's (name -> bytes), `outputs` its outputs' names.

    Raises MemoryLimitError when the arena or the scratch exceeds `limits["arena"]` / `limits["workspace"]`.
    """
    blocks, groups, sizes = _make_blocks(uses, inputs)
    extents = {b.name: b.nbytes for b in blocks}
    own = [n for n in dict.fromkeys((*inputs, *outputs)) if n in sizes]
    roots_of_own = {groups.root(n) for n in own}
    offsets, top = find_best_placement([b for b in blocks if b.name not in roots_of_own])
    scratch = max((u.scratch for u in uses), default=0)
    scratch_offset = top
    top += align_size(scratch)
    for root in dict.fromkeys(groups.root(n) for n in own):
        offsets[root] = top
        top += align_size(extents[root])
    plan = ArenaPlan(top, {n: offsets[groups.root(n)] + groups.offset(n) for n in sizes}, sizes, scratch_offset, scratch)
    _check_limits(plan, blocks, limits or {})
    return plan


def _make_blocks(uses: Sequence[Use], inputs: Mapping[str, int]) -> tuple[list[Block], Groups, dict[str, int]]:
    """Blocks (one per group of tensors that share bytes), the groups, and sizes in bytes by tensor name."""
    first: dict[str, int] = dict.fromkeys(inputs, -1)
    last: dict[str, int] = dict.fromkeys(inputs, len(uses))
    sizes: dict[str, int] = dict(inputs)
    groups = Groups()
    for n, nbytes in inputs.items():
        groups.add(n, nbytes)
    for step, use in enumerate(uses):
        for name, nbytes in use.outputs:
            first[name] = last[name] = step
            sizes[name] = nbytes
            groups.add(name, nbytes)
        for operand in use.inputs:
            if operand is not None and operand[0] in last:
                last[operand[0]] = max(last[operand[0]], step)
        for (i, o), shift in zip(use.inplace, use.shifts or (0,) * len(use.inplace), strict=True):
            source, made = use.inputs[i], use.outputs[o]
            assert source is not None, f"'{use.layer}' works in place on an operand that it does not have"
            assert source[0] in first, f"'{use.layer}' works in place on %{source[0]}, which is not in the arena"
            assert use.shifts or source[1] == made[1], f"'{use.layer}' works in place on operands of different sizes"
            joined = groups.join(source[0], made[0], shift)
            assert joined, f"'{use.layer}' wants %{source[0]} and %{made[0]} to share bytes that lie elsewhere already"
    spans: dict[str, tuple[int, int]] = {}
    for name in sizes:
        root = groups.root(name)
        a, b = spans.get(root, (first[name], last[name]))
        spans[root] = (min(a, first[name]), max(b, last[name]))
    return [Block(n, groups.get_extent(n), *spans[n]) for n in spans], groups, sizes


def find_best_placement(blocks: Sequence[Block]) -> tuple[dict[str, int], int]:
    """The smallest of several greedy placements: by size, by size times length of the live interval, by first step, by interval length.

    Placing by first step alone takes time n log n. The other orders need the list of overlapping blocks, whose length may be quadratic: beyond
    a limit they are left out.
    """
    orders = (
        lambda b: (-b.nbytes, b.first),
        lambda b: (-b.nbytes * (b.last - b.first + 1), b.first),
        lambda b: (b.first - b.last, -b.nbytes),
    )
    overlaps = list_overlaps(blocks, OVERLAPS + OVERLAPS_PER_BLOCK * len(blocks))
    plans = [] if overlaps is None else [_place(sorted(blocks, key=lambda b: (order(b), b.name)), overlaps) for order in orders]
    plans.insert(2, _place_by_first(blocks))
    return min(plans, key=lambda p: p[1])


def list_overlaps(blocks: Sequence[Block], limit: int) -> dict[str, list[Block]] | None:
    """The blocks of at least one byte with live intervals that overlap a block's own, by its name; None if there are more than `limit` pairs."""
    overlaps: dict[str, list[Block]] = {b.name: [] for b in blocks}
    live: dict[str, Block] = {}
    ends: list[tuple[int, str]] = []
    pairs = 0
    for b in sorted(blocks, key=lambda b: b.first):
        while ends and ends[0][0] < b.first:
            del live[heappop(ends)[1]]
        pairs += len(live)
        if pairs > limit:
            return None
        if b.nbytes:
            for o in live.values():
                overlaps[o.name].append(b)
        overlaps[b.name].extend(o for o in live.values() if o.nbytes)
        live[b.name] = b
        heappush(ends, (b.last, b.name))
    return overlaps


def _place(blocks: Sequence[Block], overlaps: Mapping[str, Sequence[Block]]) -> tuple[dict[str, int], int]:
    """Best fit: each block goes into the smallest gap between the placed blocks that are live at the same time."""
    placed: dict[str, int] = {}
    top = 0
    for b in blocks:
        taken = sorted((placed[o.name], placed[o.name] + align_size(o.nbytes)) for o in overlaps[b.name] if o.name in placed)
        need, spot, tightest, end = align_size(b.nbytes), None, None, 0
        for start, stop in taken:
            gap = start - end
            if gap >= need and (tightest is None or gap < tightest):
                spot, tightest = end, gap
            end = max(end, stop)
        at = end if spot is None else spot
        placed[b.name] = at
        top = max(top, at + need)
    return placed, top


def _place_by_first(blocks: Sequence[Block]) -> tuple[dict[str, int], int]:
    """Best fit in order of the first step: the gaps are those between the blocks that live at that step, kept in a list of free ranges."""
    free, placed, top = FreeRanges(), {}, 0
    ends: list[tuple[int, int, int]] = []  # (last step, offset, bytes)
    for b in sorted(blocks, key=lambda b: (b.first, -b.nbytes, b.name)):
        while ends and ends[0][0] < b.first:
            _, at, nbytes = heappop(ends)
            free.release(at, nbytes)
        need = align_size(b.nbytes)
        placed[b.name] = at = free.take(need)
        top = max(top, at + need)
        if need:
            heappush(ends, (b.last, at, need))
    return placed, top


def _check_limits(plan: ArenaPlan, blocks: Sequence[Block], limits: Mapping[str, int]) -> None:
    if "workspace" in limits and plan.scratch_bytes > limits["workspace"]:
        raise MemoryLimitError(
            f"the largest scratch that a chosen kernel needs is {plan.scratch_bytes / 2**20:.2f} MiB, --memPoolSize=workspace allows "
            f"{limits['workspace'] / 2**20:.2f} MiB. Raise the limit; kernels with less scratch were already preferred."
        )
    if "arena" in limits and plan.total > limits["arena"]:
        largest = sorted(blocks, key=lambda b: -b.nbytes)[:3]
        names = ", ".join(f"%{b.name} {b.nbytes / 2**20:.2f} MiB" for b in largest)
        raise MemoryLimitError(
            f"the arena needs {plan.total / 2**20:.2f} MiB, --memPoolSize=arena allows {limits['arena'] / 2**20:.2f} MiB. The largest "
            f"tensors are {names}. Raise the limit, or lower the profile's largest shapes or the batch."
        )
