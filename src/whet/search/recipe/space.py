"""The search space of a network on a device: classes of coupled groups with a share to cut, precision, fusion, batch; seeds to begin with.

A class holds groups of one size and one role (inside a block, or joined by a residual sum), in the order of the network: for a
residual network these are its stages. Every dimension that was left out says why.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.backends import capabilities_of, get_backend
from whet.errors import BackendError, PruneError, UsageError
from whet.network import Network
from whet.pruning import Group, groups
from whet.pruning.importance import step_of
from whet.pruning.skipping import resolve_skipped
from whet.search.recipe.recipe import PRECISIONS, STORAGE, AutoRecipe

_FLOAT = 1e-9
_BUDGETS = (0.2, 0.9)  # shares of the layers' time that the knapsack is asked for


@dataclass(frozen=True)
class Candidate:
    """One point: what is done to the original, and how the result is built. Plain data; widths are shares cut, by class."""

    widths: Mapping[str, float] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # residual branches that are taken out whole
    importance: str = "l1"
    precision: str = "fp32"
    two_four: bool = False
    fusion: str = "all"
    batch: int = 1
    budget: float | None = None  # share of the layers' measured time that may stay; the knapsack chooses widths and branches for it

    def to_plain(self) -> dict[str, Any]:
        return {**vars(self), "widths": dict(self.widths), "removed": list(self.removed)}

    @staticmethod
    def from_plain(data: Mapping[str, Any]) -> Candidate:
        return Candidate(**{**data, "removed": tuple(data.get("removed", ()))})

    @property
    def pruned(self) -> bool:
        """Whether anything is taken out."""
        return self.budget is not None or bool(self.removed) or any(r > _FLOAT for r in self.widths.values())

    def words(self) -> str:
        """A short line for people: `int8, cut 0.5 of width 48 inner, ...`."""
        cuts = [f"{name} -{100 * r:.0f} %" for name, r in self.widths.items() if r > _FLOAT]
        if self.budget is not None:
            cuts = [f"{100 * self.budget:.0f} % of the layers' time to share out"]
        branches = f"{len(self.removed)} branches out" if self.removed else ""
        more = [w for w in (branches, "2:4" if self.two_four else "", "" if self.fusion == "all" else f"passes {self.fusion}") if w]
        return ", ".join([self.precision, *([f"batch {self.batch}"] if self.batch != 1 else []), *more, *(cuts or ["nothing cut"])])


@dataclass(frozen=True)
class Dimension:
    """One thing that the sampler chooses: of `values`, or a share from `least` to `most` in steps."""

    name: str
    values: tuple[Any, ...] = ()
    most: float = 0.0
    step: float = 0.1
    least: float = 0.0


@dataclass(frozen=True)
class SearchSpace:
    """`classes`: names of the groups of each class; `sizes`: units of each group; `left_out`: (what, why) for people."""

    dimensions: tuple[Dimension, ...]
    fixed: Mapping[str, Any]
    classes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    steps: Mapping[str, int]  # units that go together, by group: a head is one, channels go in multiples
    branches: tuple[str, ...] = ()  # those that can be removed, the least needed first
    left_out: tuple[tuple[str, str], ...] = ()

    def candidate(self, params: Mapping[str, Any]) -> Candidate:
        """The candidate of a sampler's parameters."""
        given = {**self.fixed, **params}
        rest = (given["importance"], given["precision"], given["two_four"], given["fusion"], given["batch"])
        if given.get("width by") == "budget":
            return Candidate({}, (), *rest, round(float(given["budget"]), 6))
        widths = {name: round(float(given[name]), 6) for name in self.classes if name in given}
        removed = tuple(sorted(self.branches[: int(given.get("depth", 0))]))
        return Candidate(widths, removed, *rest)

    def kept(self, candidate: Candidate) -> dict[str, int]:
        """Channels that stay of each group that loses some."""
        found = {}
        for name, share in candidate.widths.items():
            for g in self.classes[name]:
                n = kept_channels(self.sizes[g], share, self.steps[g])
                if n < self.sizes[g]:
                    found[g] = n
        return found

    def key(self, candidate: Candidate) -> str:
        """The same for candidates that come to the same engine: shares that round to the same channels count as one."""
        kept = self.kept(candidate)
        cut = bool(kept) or candidate.budget is not None
        rest = {k: v for k, v in candidate.to_plain().items() if k != "widths" and (k != "importance" or cut)}
        return hashlib.sha256(json.dumps([kept, rest], sort_keys=True).encode()).hexdigest()[:16]

    def seeds(self) -> list[dict[str, Any]]:
        """Points to begin with: even cuts of all classes in the narrowest type and in the widest. (Nothing cut: that are the baselines.)"""
        types = next((d.values for d in self.dimensions if d.name == "precision"), ())
        others = {d.name: d.values[0] for d in self.dimensions if d.values and d.name != "precision"}
        widths = [d for d in self.dimensions if not d.values]
        found = []
        ways = ("class", "budget") if any(d.name == "width by" for d in self.dimensions) else ("",)
        for share in (0.5, 0.3, 0.7, 0.2) if widths else ():
            for p in dict.fromkeys((*types[-1:], *types[:1])) or (None,):
                for way in ways:
                    point = {d.name: round(max(min(round(share / d.step) * d.step, d.most), d.least), 6) for d in widths}
                    found.append(point | ({} if p is None else {"precision": p}) | others | ({"width by": way} if way else {}))
        return [p for i, p in enumerate(found) if p not in found[:i]]  # with coarse steps two shares are one

    def size(self) -> int:
        """How many points there are."""
        n = 1
        for d in self.dimensions:
            n *= len(d.values) if d.values else round((d.most - d.least) / d.step) + 1
        return n


def search_space(net: Network, recipe: AutoRecipe, branches: Sequence[str] = ()) -> SearchSpace:
    """The space of a source network under a recipe. `branches`: residual branches that may go, the least needed first."""
    s = recipe.space
    left: list[tuple[str, str]] = []
    whole = stay_whole(net, s.skip)
    found = [g for g in groups(net) if g.name not in whole] if s.width else []
    branches = [b for b in branches if b not in whole]
    if whole:
        left.append(("what `space.skip` names", f"{len(whole)} groups and branches stay whole: {', '.join(sorted(whole)[:6])}"))
    sizes = {g.name: g.size for g in found}
    steps = {g.name: granularity(g, s.width.multiple) for g in found} if s.width else {}
    classes = group_classes(net, found, s.width.classes) if s.width else {}
    if s.width and not classes:
        left.append(("width", "the network has no channels that can be cut: each is tied to an input, an output or an op that needs it whole"))
    precisions, missing = _precisions(recipe)
    left += missing
    if s.two_four == (False,):
        why = f"no tactic of the backend '{recipe.backend}' skips zeros, so the engine cannot see them; `space.two_four: [false, true]` measures it"
        left.append(("2:4", why))
    if s.depth and not branches:
        left.append(("depth", "no residual branch can go whole: a shortcut that changes its shape needs what is added to it"))
    if s.fusion == ("all",):
        left.append(("fusion", 'all passes are on: `space.fusion: [all, "-fuse_conv_add"]` tries others (`whet passes` lists them)'))
    if len(s.batch) == 1:
        left.append(("batch", f"{s.batch[0]} alone: `space.batch: [1, 8]` searches over it"))
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
            left = [x for x in left if x[0] != "batch"]
            left.append(("batch", f"the model's batch is fixed at {fixed_batch}"))
    dimensions = [Dimension(name, most=s.width.most, step=s.width.step) for name in classes] if s.width else []
    if s.budget and dimensions:
        dimensions += [Dimension("width by", ("class", "budget")), Dimension("budget", most=_BUDGETS[1], least=_BUDGETS[0])]
    dimensions += [Dimension(name, values) for name, values in lists.items() if len(values) > 1]
    fixed = {name: values[0] for name, values in lists.items() if len(values) == 1}
    return SearchSpace(tuple(dimensions), fixed, classes, sizes, steps, tuple(branches), tuple(left))


def stay_whole(net: Network, skip: Sequence[str]) -> frozenset[str]:
    """The groups and branches that `space.skip` means. Raises UsageError for a name that is none of these, with the nearest."""
    try:
        return resolve_skipped(net, skip)
    except PruneError as e:
        raise UsageError(f"'space.skip': {e}") from None


def group_classes(net: Network, found: Sequence[Group], most: int) -> dict[str, tuple[str, ...]]:
    """Groups alike in size and role, in the order of the network: at most `most` classes (then by size alone, then neighbours)."""
    op = {layer.name: layer.op for layer in net.layers}

    def role(g: Group) -> str:
        if "@" in g.name:
            return "heads" if g.name.endswith("@1") else "head width"
        if g.block > 1:  # whole heads of separate projections, whole groups of a convolution
            return "groups" if any(op.get(n) == "Conv" for n in g.layers) else "heads"
        return "joined" if any(op.get(n) in ("Add", "Sum", "Concat") for n in g.layers) else "inner"

    def gathered(names: list[str]) -> dict[str, tuple[str, ...]]:
        made: dict[str, list[str]] = {}
        for name, g in zip(names, found, strict=True):
            made.setdefault(name, []).append(g.name)
        return {k: tuple(v) for k, v in made.items()}

    classes = gathered([f"{g.size} {role(g)}" for g in found])
    if len(classes) > most:
        classes = gathered([f"{g.size} wide" for g in found])
    if len(classes) > most:
        classes = gathered([f"part {i * most // len(found) + 1} of {most}" for i in range(len(found))])
    return classes


def kept_channels(size: int, share: float, multiple: int) -> int:
    """Channels that stay of `size` when `share` goes, a multiple of `multiple` and at least one of them."""
    return size if share <= _FLOAT else min(size, max(multiple, round(size * (1 - share) / multiple) * multiple))


def granularity(g: Group, multiple: int) -> int:
    """Heads and factors of a product go one by one; channels in multiples, smaller ones where a group is narrow."""
    if "@" in g.name:
        return 1
    return max(1, min(step_of(g, multiple), g.size // 4))


def _precisions(recipe: AutoRecipe) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """Those of the recipe, else those that the device has (FP8 only where it is asked for), widest first; and why the others are not."""
    missing = missing_types(recipe)
    wanted = recipe.space.precision or tuple(p for p in PRECISIONS if p not in missing and p != "fp8")
    usable = tuple(p for p in PRECISIONS if p in wanted and p not in missing)
    told = wanted if recipe.space.precision else PRECISIONS
    left = [(p, missing[p]) for p in told if p in missing]
    if not recipe.space.precision and "fp8" not in missing:
        left.append(("fp8", "only where it is asked for: `space.precision: [fp16, int8, fp8]`"))
    return usable or ("fp32",), left


def baseline_types(recipe: AutoRecipe, searched: Sequence[str]) -> tuple[str, ...]:
    """The types that the original is measured in: FP32 first, then those asked for, else 16 bits, INT8 and what is searched over."""
    missing = missing_types(recipe)
    wanted = recipe.baselines or (*(p for p in PRECISIONS if p != "fp8"), *searched)
    return tuple(p for p in PRECISIONS if p == "fp32" or (p in wanted and p not in missing))


def missing_types(recipe: AutoRecipe) -> dict[str, str]:
    """The types that the device does not compute in, with the reason.

    Numbered devices (GPUs) are not opened: a context would stay on one of them while trials run, and with Ray they are on other machines. Where such
    a device has no FP8, the builder reports it and gives an engine in floating point.
    """
    capabilities = capabilities_of(recipe.backend)
    if capabilities.numbered_devices:
        return {}
    if not capabilities.executes:
        return {p: f"the backend '{recipe.backend}' computes nothing: its times are of shapes" for p in PRECISIONS if p != "fp32"}
    missing = capabilities.unsupported_types
    try:
        here = get_backend(recipe.backend, threads=recipe.threads).capabilities.unsupported_types
    except BackendError:
        here = missing
    never = {p: f"no kernel of the backend '{recipe.backend}' computes in it" for p in PRECISIONS if STORAGE.get(p) in missing}
    return never | {p: "this processor has no instructions for it" for p in PRECISIONS if STORAGE.get(p) in here - missing}
