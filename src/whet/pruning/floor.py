"""Selections compared by the outputs: a floor of uniform cuts (the same share of every group at the same cost, without removed branches), and
selections with reweighted importances; the best one is kept.

Importances are local: a selection may lose little by each of them and destroy the network. Its outputs tell. The cut networks are recovered on a
part of the data and compared on the rest, since errors on the fitted samples mislead (ResNet-56: a smaller error there, 3 points less accuracy).
Random factors per group make selections differ where the sum of local losses is a poor guide (SPDY: E. Frantar and D. Alistarh, ICML 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whet.network import Network
from whet.pruning._sweep import Sweep
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group
from whet.pruning.cut import cut
from whet.pruning.knapsack import Choice, list_widths
from whet.pruning.recovery import Progress, RecoveryConfig, recover
from whet.pruning.sizes import factor_counts

FEWEST = 8  # samples below which nothing is compared
_HELD = 4  # one of so many samples is held out
_ONE_PART = 16  # samples from which one part is held out; of fewer each half in turn, because two or three say little
_ROWS = 8192  # positions that a layer of a compared network is fitted on at most
_SHARES = 64  # shares that are tried


@dataclass(frozen=True)
class Floor:
    """Relative output errors (root mean square) on held-out samples of the best selection and of uniform cuts (None: there are none)."""

    chosen: float
    uniform: float | None
    first: float | None = None  # of the selection without reweighting, if there were others
    trials: int = 0  # number of reweighted selections
    by_importance: Mapping[str, float] = field(default_factory=dict)  # errors of the selections by several importances; empty: there was one

    @property
    def fails(self) -> bool:
        """True if the uniform cuts change the outputs less."""
        return self.uniform is not None and self.uniform < self.chosen


def reweight_scores(scores: Mapping[str, np.ndarray], seed: int, trial: int) -> Mapping[str, np.ndarray]:
    """The scores with a random factor from 1/2 to 2 for each group and branch; unchanged in trial 0."""
    if not trial:
        return scores
    rng = np.random.default_rng((seed, trial))
    return {name: v * 2 ** rng.uniform(-1, 1) for name, v in scores.items()}


def find_uniform_choice(
    channel_groups: Sequence[Group], scores: Mapping[str, np.ndarray], costs: Costs, target: float, multiple: int | None, most: int = 12
) -> Choice | None:
    """The widest uniform cut with a cost of at most `target`: every group keeps the same share of its units, those with the largest scores.

    None if no share is narrow enough.
    """
    factors = factor_counts(channel_groups)
    candidates = {g.name: np.array(list_widths(g, multiple, most)) for g in channel_groups if g.name in costs.items_of}
    sizes = {g.name: g.size for g in channel_groups}
    for share in np.linspace(1, 0, _SHARES, endpoint=False)[1:]:
        wanted = {name: sizes[name] * share ** (1 / factors[name]) for name in candidates}
        widths = {name: int(w[np.argmin(np.abs(w - wanted[name]))]) for name, w in candidates.items()}
        narrowed = {name: w for name, w in widths.items() if w < sizes[name]}
        after = costs.total(narrowed)
        if after <= target:
            kept = {name: np.sort(np.argsort(-scores[name], kind="stable")[:w]) for name, w in narrowed.items()}
            lost = float(sum(np.sort(scores[name])[: sizes[name] - w].sum() for name, w in narrowed.items()))
            return Choice(kept, (), costs.total({}), after, lost)
    return None


def measure_held_out_errors(
    net: Network,
    channel_groups: Sequence[Group],
    choices: Sequence[Choice],
    data: Mapping[str, np.ndarray],
    config: RecoveryConfig,
    progress: Progress | None = None,
) -> list[float] | None:
    """The output error of each choice after recovery, on samples that were not fitted; None with fewer than FEWEST samples.

    With few samples it is the mean over several splits.
    """
    config = replace(config, rows=min(config.rows, _ROWS))
    small = [cut(net, c.kept, channel_groups, removed=c.removed) for c in choices]
    pairs = split_samples(net, data, config.seed)
    errors = np.zeros((len(pairs), len(choices)))
    for i, (fitted, judged) in enumerate(pairs):
        wanted = compute_outputs(net, judged)
        for k, (s, c) in enumerate(zip(small, choices, strict=True)):
            made = recover(s, net, c.kept, fitted, config, _number_messages(progress, i * len(choices) + k + 1, errors.size))
            errors[i, k] = compute_rms_error(wanted, compute_outputs(made, judged))
    return [float(e) for e in errors.mean(0)] if pairs else None


def _number_messages(progress: Progress | None, n: int, total: int) -> Progress | None:
    """`progress` with the number of the recovery in front of the messages."""
    return None if progress is None else lambda done, layers, text: progress(done, layers, f"comparing selections, {n} of {total}: {text}")


def split_samples(net: Network, data: Mapping[str, np.ndarray], seed: int) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Pairs of samples to fit and samples to compare on, each in whole batches of a network with a fixed batch.

    One pair; with fewer than 16 samples two, in which each sample is compared on once; none with fewer than FEWEST samples or four batches.
    """
    arrays = {name: np.asarray(a) for name, a in data.items()}
    count = min(len(a) for a in arrays.values())
    batches = {t.shape[0] for t in net.inputs if t.type.rank and isinstance(t.shape[0], int)}
    batch = int(max(batches)) if batches else 1
    runs = count // batch
    if count < FEWEST or runs < _HELD:
        return []
    order = np.random.default_rng(seed).permutation(runs)
    parts = [order[: runs // _HELD]] if count >= _ONE_PART else np.array_split(order, 2)
    pairs = []
    for part in parts:
        held = np.isin(np.repeat(np.arange(runs), batch), part)
        fitted, judged = ({name: a[: runs * batch][chosen] for name, a in arrays.items()} for chosen in (~held, held))
        pairs.append((fitted, judged))
    return pairs


def compute_outputs(net: Network, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name on samples (along axis 0), also of a network with a fixed batch."""
    sweep = Sweep(net, data)
    for _ in net.layers:
        sweep.step()
    return {t.name: sweep.value(t) for t in net.outputs}


def compute_rms_error(wanted: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> float:
    """Root mean square error relative to the standard deviation of the output, averaged over the floating-point outputs."""
    errors = []
    for name, w in wanted.items():
        if w.dtype.kind == "f":
            spread = float(np.var(w, dtype=np.float64))
            errors.append((float(np.mean(np.square(got[name] - w, dtype=np.float64))) / max(spread, 1e-30)) ** 0.5)
    return float(np.mean(errors)) if errors else 0.0
