"""Order of a weight's input channels for which a 2:4 mask keeps the largest scores (Pool and Yu, Channel Permutations for N:M Sparsity, 2021).

Groups of four adjacent columns ("stripes") compete for two places per row. The search exchanges columns between pairs of stripes: of eight columns
there are 35 partitions into two stripes, and the best one is taken. The pair with the largest gain goes first; after an exchange only pairs with
one of its two stripes change.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from time import perf_counter

import numpy as np

_ROWS = 4096  # rows that the search looks at; a sum over sampled rows orders partitions as the sum over all rows does
_SMALLEST_GAIN = 1e-6  # relative to the kept sum: below it an exchange is rounding

# The partitions of eight columns into two stripes: the first has column 0; without the first, which exchanges nothing.
_FIRST = np.array([(0, *rest) for rest in combinations(range(1, 8), 3)])
_SECOND = np.array([[c for c in range(8) if c not in first] for first in _FIRST.tolist()])


def compute_kept_sum(scores: np.ndarray) -> float:
    """The sum of the two largest scores of each aligned group of four along the last axis; scores [rows, columns]."""
    four = scores.reshape(len(scores), -1, 4)
    return float(_sum_top_two(four[..., 0], four[..., 1], four[..., 2], four[..., 3]).sum(dtype=np.float64))


def find_best_order(scores: np.ndarray, seconds: float, tick: Callable[[], None] | None = None, seed: int = 0) -> np.ndarray:
    """The order of the columns, int64 [columns], for which 2:4 masks keep the most; the identity if no exchange is found in `seconds`.

    scores: float [rows, columns], not negative; columns in whole groups of four. The result is the same on every machine unless the time ends first.
    `tick` is called after every pair of stripes.
    """
    rows, columns = scores.shape
    order = np.arange(columns)
    rng = np.random.default_rng(seed)
    if rows > _ROWS:
        scores = scores[np.sort(rng.permutation(rows)[:_ROWS])]
    by_column = np.ascontiguousarray(scores.T, np.float32)
    until, stripes = perf_counter() + seconds, columns // 4
    smallest = _SMALLEST_GAIN * compute_kept_sum(by_column.T)
    gains = np.zeros((stripes, stripes))
    choices = np.zeros((stripes, stripes), np.int64)
    stale = {(a, b) for a in range(stripes) for b in range(a + 1, stripes)}
    while stale:
        pairs = sorted(stale)
        for a, b in (pairs[i] for i in rng.permutation(len(pairs))):  # if the time ends, all stripes have had a chance
            if perf_counter() > until:
                stale = set()
                break
            both = np.concatenate([order[4 * a : 4 * a + 4], order[4 * b : 4 * b + 4]])
            gains[a, b], choices[a, b] = _find_best_partition(by_column[both])
            if tick is not None:
                tick()
        ended, stale = not stale, set()
        free = np.ones(stripes, bool)  # exchanges of different stripes do not affect one another
        for at in np.argsort(-gains, axis=None, kind="stable"):
            a, b = divmod(int(at), stripes)
            if gains[a, b] <= smallest:
                break
            if not free[a] or not free[b]:
                continue
            both = np.concatenate([order[4 * a : 4 * a + 4], order[4 * b : 4 * b + 4]])
            order[4 * a : 4 * a + 4], order[4 * b : 4 * b + 4] = both[_FIRST[choices[a, b]]], both[_SECOND[choices[a, b]]]
            free[[a, b]] = False
        for s in map(int, np.flatnonzero(~free)):
            gains[s, :] = gains[:, s] = 0
            stale |= {(min(s, o), max(s, o)) for o in range(stripes) if o != s}
        if ended:
            break
    return order


def _find_best_partition(columns: np.ndarray) -> tuple[float, int]:
    """The gain in the kept sum and the index of the best partition of eight columns [8, rows]."""
    larger = {(i, j): np.maximum(columns[i], columns[j]) for i, j in combinations(range(8), 2)}
    both = {(i, j): columns[i] + columns[j] for i, j in combinations(range(8), 2)}

    def sum_kept(four: np.ndarray) -> float:
        i, j, k, m = four.tolist()
        best = np.maximum(both[i, j], both[k, m])
        return float(np.maximum(best, larger[i, j] + larger[k, m], out=best).sum(dtype=np.float64))

    sums = [sum_kept(first) + sum_kept(second) for first, second in zip(_FIRST, _SECOND, strict=True)]
    best = int(np.argmax(sums))
    return sums[best] - sums[0], best


def _sum_top_two(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    return np.maximum(np.maximum(a + b, c + d), np.maximum(a, b) + np.maximum(c, d))
