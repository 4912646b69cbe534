"""The search space of a network on a device: shares to prune by class of coupled groups, precision, fusion, batch; seed points.

A class holds groups of equal size and role (inside a block, or joined by a residual sum), in network order: in a residual network these
are its stages. Every omitted dimension has a recorded reason.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.backends import get_backend, get_capabilities
from whet.errors import BackendError, PruneError, UsageError
from whet.network import Network
from whet.pruning import Group, groups
from whet.pruning.coupling import HIDDEN
from whet.pruning.importance import get_step
from whet.pruning.skipping import resolve_skipped
from whet.search.recipe.recipe import PRECISIONS, STORAGE, AutoRecipe, Space

_FLOAT = 1e-9
ROLES = {  # the second part of a class name, after the size of its groups
    "inner": "channels inside a block, between two layers",
    "joined": "channels that a residual sum or a concatenation joins",
    "heads": "attention heads",
    "head width": "values of every attention head",
    "groups": "groups of a convolution",
    "residual": "channels of the residual stream, through the statistics of norms",
    "wide": "channels",
}
_BUDGETS = (0.2, 0.9)  # range of the knapsack's latency budget, as a share of the layers' time


@dataclass(frozen=True)
class Candidate:
    """One point: the changes to the original and the build options. Plain data; `widths` are removed shares by class."""

    widths: Mapping[str, float] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # residual branches to remove
    importance: str = "l1"
    precision: str = "fp32"
    two_four: bool = False
    fusion: str = "all"
    batch: int = 1
    budget: float | None = None  # remaining share of the layers' measured time; the knapsack chooses widths and branches for it

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "widths": dict(self.widths), "removed": list(self.removed)}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Candidate:
        return Candidate(**{**data, "removed": tuple(data.get("removed", ()))})

    @property
    def pruned(self) -> bool:
        """True if anything is pruned."""
        return self.budget is not None or bool(self.removed) or any(r > _FLOAT for r in self.widths.values())

    def words(self) -> str:
        """A one-line description: `int8, width 48 inner -50 %, ...`."""
        cuts = [f"{name} -{100 * r:.0f} %" for name, r in self.widths.items() if r > _FLOAT]
        if self.budget is not None:
            cuts = [f"latency budget {100 * self.budget:.0f} %"]
        branches = f"{len(self.removed)} branches removed" if self.removed else ""
        more = [w for w in (branches, "2:4" if self.two_four else "", "" if self.fusion == "all" else f"passes {self.fusion}") if w]
        return ", ".join([self.precision, *([f"batch {self.batch}"] if self.batch != 1 else []), *more, *(cuts or ["not pruned"])])


@dataclass(frozen=True)
class Dimension:
    """One dimension of the sampler: one of `values`, or a share from `least` to `most` in steps of `step`."""

    name: str
    values: tuple[Any, ...] = ()
    most: float = 0.0
    step: float = 0.1
    least: float = 0.0


@dataclass(frozen=True)
class SearchSpace:
    """`classes`: group names by class; `sizes`: units of each group; `left_out`: (dimension, reason) for reports."""

    dimensions: tuple[Dimension, ...]
    fixed: Mapping[str, Any]
    classes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    steps: Mapping[str, int]  # pruning granularity by group, in units: 1 for heads, a multiple for channels
    branches: tuple[str, ...] = ()  # removable branches, least important first
    left_out: tuple[tuple[str, str], ...] = ()

    def candidate(self, params: Mapping[str, Any]) -> Candidate:
        """The candidate of a sampler's parameters."""
        values = {**self.fixed, **params}
        rest = (values["importance"], values["precision"], values["two_four"], values["fusion"], values["batch"])
        if values.get("width by") == "budget":
            return Candidate({}, (), *rest, round(float(values["budget"]), 6))
        widths = {name: round(float(values[name]), 6) for name in self.classes if name in values}
        removed = tuple(sorted(self.branches[: int(values.get("depth", 0))]))
        return Candidate(widths, removed, *rest)

    def kept(self, candidate: Candidate) -> dict[str, int]:
        """Kept channels by group, for groups that are pruned."""
        channels = {}
        for name, share in candidate.widths.items():
            for g in self.classes[name]:
                n = count_kept_channels(self.sizes[g], share, self.steps[g])
                if n < self.sizes[g]:
                    channels[g] = n
        return channels

    def key(self, candidate: Candidate) -> str:
        """A key equal for candidates with the same engine: shares that round to the same channels count as one."""
        kept = self.kept(candidate)
        cut = bool(kept) or candidate.budget is not None
        rest = {k: v for k, v in candidate.to_plain().items() if k != "widths" and (k != "importance" or cut)}
        return hashlib.sha256(json.dumps([kept, rest], sort_keys=True).encode()).hexdigest()[:16]

    def seeds(self) -> list[dict[str, Any]]:
        """Points to try first: equal shares for all classes in the smallest and the largest type. (The unpruned points are the baselines.)"""
        types = next((d.values for d in self.dimensions if d.name == "precision"), ())
        others = {d.name: d.values[0] for d in self.dimensions if d.values and d.name != "precision"}
        widths = [d for d in self.dimensions if not d.values]
        points = []
        ways = ("class", "budget") if any(d.name == "width by" for d in self.dimensions) else ("",)
        for share in (0.5, 0.3, 0.7, 0.2) if widths else ():
            for p in dict.fromkeys((*types[-1:], *types[:1])) or (None,):
                for way in ways:
                    point = {d.name: round(max(min(round(share / d.step) * d.step, d.most), d.least), 6) for d in widths}
                    points.append(point | ({} if p is None else {"precision": p}) | others | ({"width by": way} if way else {}))
        return [p for i, p in enumerate(points) if p not in points[:i]]  # with coarse steps two shares may coincide

    def describe_class(self, name: str) -> str:
        """The units that a cut of a class removes: "24 of 48 channels inside a block, in each of 9 groups (conv1.weight, ...)" for half of it."""
        members = self.classes[name]
        size, _, role = name.partition(" ")
        sizes = sorted({self.sizes[g] for g in members})
        what = f"{size} {ROLES[role]}" if role in ROLES else f"channels of groups with {', '.join(map(str, sizes))} of them, in network order"
        half = count_kept_channels(sizes[-1], 0.5, self.steps[max(members, key=lambda g: self.sizes[g])])
        listed = ", ".join(members[:3]) + (", ..." if len(members) > 3 else "")
        groups = f"in each of {len(members)} groups" if len(members) > 1 else "in one group"
        return f"{what}, {groups} ({listed}); -50 % leaves {half} of {sizes[-1]}"

    def size(self) -> int:
        """Number of points."""
        n = 1
        for d in self.dimensions:
            n *= len(d.values) if d.values else round((d.most - d.least) / d.step) + 1
        return n


def search_space(net: Network, recipe: AutoRecipe, branches: Sequence[str] = ()) -> SearchSpace:
    """The space of a source network under a recipe. `branches`: removable residual branches, least important first."""
    s = recipe.space
    left_out: list[tuple[str, str]] = []
    unpruned = list_groups_to_keep(net, s)
    coupled = [g for g in groups(net, hidden=s.hidden) if g.name not in unpruned] if s.width else []
    branches = [b for b in branches if b not in unpruned]
    if unpruned:
        left_out.append(("what `space.skip` names", f"{len(unpruned)} groups and branches are not pruned: {', '.join(sorted(unpruned)[:6])}"))
    sizes = {g.name: g.size for g in coupled}
    steps = {g.name: get_granularity(g, s.width.multiple) for g in coupled} if s.width else {}
    classes = group_classes(net, coupled, s.width.classes) if s.width else {}
    if s.width and not classes:
        left_out.append(("width", "the network has no prunable channels: each is coupled to an input, an output or an op that cannot be pruned"))
    precisions, missing = _list_precisions(recipe)
    left_out += missing
    if s.two_four == (False,):
        why = "not searched by default, since it needs fine-tuning; `space.two_four: [false, true]` tries it in the layers that gain time"
        left_out.append(("2:4", why))
    if s.depth and not branches:
        left_out.append(("depth", "no residual branch can be removed: a shortcut that changes the shape needs its branch"))
    if s.fusion == ("all",):
        left_out.append(("fusion", 'all passes are on: `space.fusion: [all, "-fuse_conv_add"]` tries others (`whet passes` lists them)'))
    if len(s.batch) == 1:
        left_out.append(("batch", f"only {s.batch[0]}: `space.batch: [1, 8]` searches over it"))
    lists: dict[str, tuple] = {
        "depth": tuple(range(len(branches) + 1)) if s.depth else (0,),
        "importance": s.importance if classes else s.importance[:1],
        "precision": precisions,
        "two_four": s.two_four,
        "fusion": s.fusion,
        "batch": s.batch,
    }
    fixed_batch = next((t.shape[0] for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)), None)
    if fixed_batch is not None:
        lists["batch"] = (fixed_batch,)
        if s.batch not in ((1,), (fixed_batch,)):
            left_out = [x for x in left_out if x[0] != "batch"]
            left_out.append(("batch", f"the model's batch is fixed at {fixed_batch}"))
    dimensions = [Dimension(name, most=s.width.most, step=s.width.step) for name in classes] if s.width else []
    if s.budget and dimensions:
        dimensions += [Dimension("width by", ("class", "budget")), Dimension("budget", most=_BUDGETS[1], least=_BUDGETS[0])]
    dimensions += [Dimension(name, values) for name, values in lists.items() if len(values) > 1]
    fixed = {name: values[0] for name, values in lists.items() if len(values) == 1}
    return SearchSpace(tuple(dimensions), fixed, classes, sizes, steps, tuple(branches), tuple(left_out))


def list_groups_to_keep(net: Network, space: Space) -> frozenset[str]:
    """Groups and branches named by `space.skip`. Raises UsageError for an unknown name, with the nearest known one."""
    try:
        return resolve_skipped(net, space.skip, hidden=space.hidden)
    except PruneError as e:
        raise UsageError(f"'space.skip': {e}") from None


def group_classes(net: Network, coupled: Sequence[Group], limit: int) -> dict[str, tuple[str, ...]]:
    """Classes of groups of equal size and role, in network order: at most `limit` (else by size only, else consecutive groups)."""
    op = {layer.name: layer.op for layer in net.layers}

    def get_role(g: Group) -> str:  # one of ROLES
        if g.name.endswith(HIDDEN):
            return "residual"
        if "@" in g.name:
            return "heads" if g.name.endswith("@1") else "head width"
        if g.block > 1:  # heads of separate projections, groups of a convolution
            return "groups" if any(op.get(n) == "Conv" for n in g.layers) else "heads"
        return "joined" if any(op.get(n) in ("Add", "Sum", "Concat") for n in g.layers) else "inner"

    def gather_classes(names: list[str]) -> dict[str, tuple[str, ...]]:
        classes_: dict[str, list[str]] = {}
        for name, g in zip(names, coupled, strict=True):
            classes_.setdefault(name, []).append(g.name)
        return {k: tuple(v) for k, v in classes_.items()}

    classes = gather_classes([f"{g.size} {get_role(g)}" for g in coupled])
    if len(classes) > limit:
        classes = gather_classes([f"{g.size} wide" for g in coupled])
    if len(classes) > limit:
        classes = gather_classes([f"part {i * limit // len(coupled) + 1} of {limit}" for i in range(len(coupled))])
    return classes


def count_kept_channels(size: int, share: float, multiple: int) -> int:
    """Kept channels of `size` when `share` is removed: a multiple of `multiple`, at least one such multiple."""
    return size if share <= _FLOAT else min(size, max(multiple, round(size * (1 - share) / multiple) * multiple))


def get_granularity(g: Group, multiple: int) -> int:
    """Pruning granularity in units: 1 for heads and factors of a product; a multiple for channels, smaller for few-channel groups."""
    if "@" in g.name:
        return 1
    return max(1, min(get_step(g, multiple), g.size // 4))


def _list_precisions(recipe: AutoRecipe) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """The recipe's precisions, else the device's (FP8 only on request), in order of decreasing width; and the reasons for omitted ones."""
    missing = list_missing_types(recipe)
    wanted = recipe.space.precision or tuple(p for p in PRECISIONS if p not in missing and p != "fp8")
    usable = tuple(p for p in PRECISIONS if p in wanted and p not in missing)
    supported = wanted if recipe.space.precision else PRECISIONS
    left_out = [(p, missing[p]) for p in supported if p in missing]
    if not recipe.space.precision and "fp8" not in missing:
        left_out.append(("fp8", "only on request: `space.precision: [fp16, int8, fp8]`"))
    return usable or ("fp32",), left_out


def list_baseline_types(recipe: AutoRecipe, searched: Sequence[str]) -> tuple[str, ...]:
    """The original's measured precisions: FP32 first, then the requested ones, else 16 bits, INT8 and the searched ones."""
    missing = list_missing_types(recipe)
    wanted = recipe.baselines or (*(p for p in PRECISIONS if p != "fp8"), *searched)
    return tuple(p for p in PRECISIONS if p == "fp32" or (p in wanted and p not in missing))


def list_missing_types(recipe: AutoRecipe) -> dict[str, str]:
    """Precisions the device does not support, with the reason.

    Numbered devices (GPUs) are not opened: the context would stay open while trials run, and with Ray they are on other machines. If such a
    device has no FP8, the builder reports it and builds a floating-point engine.
    """
    capabilities = get_capabilities(recipe.backend)
    if capabilities.numbered_devices:
        return {}
    if not capabilities.executes:
        return {p: f"the backend '{recipe.backend}' computes no values: its times are estimated from shapes" for p in PRECISIONS if p != "fp32"}
    missing = capabilities.unsupported_types
    try:
        here = get_backend(recipe.backend, threads=recipe.threads).capabilities.unsupported_types
    except BackendError:
        here = missing
    never = {p: f"no kernel of the backend '{recipe.backend}' computes in it" for p in PRECISIONS if STORAGE.get(p) in missing}
    return never | {p: "this processor has no instructions for it" for p in PRECISIONS if STORAGE.get(p) in here - missing}
