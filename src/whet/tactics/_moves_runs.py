"""Runs of output rows of a Moves layer that are computed from consecutive pixels of one source.

A detector head's rows of one anchor box are such a run. A kernel that computes an image tile by tile reads off which rows a tile completes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.tactics._moves_indices import COLUMN, ROW, Place, Refused
from whet.tactics._moves_tree import Moves, Node, list_children


@dataclass(frozen=True)
class Run:
    """Rows starting at `row`: `each` rows for each of `count` source pixels starting at `pixel`. Pixels are numbered over all images."""

    source: int
    row: int
    pixel: int
    count: int
    each: int


def runs(moves: Moves, pitches: list[int]) -> list[Run]:
    """The runs of all rows, in order. Sources are channels-last with `pitches` elements between pixels.

    Raises Refused when a row is not computed from one pixel of one source.
    """
    reads = _Reads(moves, pitches)
    reads.walk(moves.root, np.arange(moves.rows), 0, moves.columns)
    if (reads.pixel < 0).any():
        raise Refused("a row of the result reads no pixel")
    source, pixel = reads.source, reads.pixel
    first = np.flatnonzero(np.r_[True, (source[1:] != source[:-1]) | (pixel[1:] != pixel[:-1])])  # first row of each group that reads one pixel
    many = np.diff(np.r_[first, moves.rows])
    goes_on = (source[first[1:]] == source[first[:-1]]) & (pixel[first[1:]] == pixel[first[:-1]] + 1) & (many[1:] == many[:-1])
    starts = np.flatnonzero(np.r_[True, ~goes_on])
    counts = np.diff(np.r_[starts, len(first)])
    return [
        Run(int(source[r]), int(r), int(pixel[r]), int(n), int(m)) for r, n, m in zip(first[starts], counts, many[starts], strict=True)
    ]  # fmt: skip


class _Reads:
    """Source and pixel of every row; -1: not known yet."""

    def __init__(self, moves: Moves, pitches: list[int]) -> None:
        self.pitches = pitches
        self.source, self.pixel = (np.full(moves.rows, -1, np.int64) for _ in range(2))

    def walk(self, node: Node, rows: np.ndarray, low: int, high: int) -> None:
        """Records the source and pixel that these rows read for the columns [low, high)."""
        if not len(rows) or low >= high:
            return
        if node[0] == "source":
            self.note(node, rows, low, high)
        elif node[0] == "choice":
            self.choose(node, rows, low, high)
        else:
            for part in list_children(node):
                self.walk(part, rows, low, high)

    def choose(self, node: Node, rows: np.ndarray, low: int, high: int) -> None:
        """Parts of a Concat: each covers some of the rows, or of the columns."""
        _, place, limits, parts = node
        start = 0
        if not place.by_column:
            at = place_values(place, rows)
            for limit, part in zip(limits, parts, strict=True):
                self.walk(part, rows[(at >= start) & (at < limit)], low, high)
                start = limit
            return
        if place.terms != ((COLUMN, 1),):
            raise Refused("parts join elsewhere in one row than in another")
        for limit, part in zip(limits, parts, strict=True):
            self.walk(part, rows, max(low, start - place.offset), min(high, limit - place.offset))
            start = limit

    def note(self, node: Node, rows: np.ndarray, low: int, high: int) -> None:
        _, which, place = node
        pitch = self.pitches[which]
        first = place_values(place.row, rows) + place.offset + place.step * low
        last = first + place.step * (high - 1 - low)
        pixel = first // pitch
        if (last // pitch != pixel).any():
            raise Refused("a row of the result is made of several pixels")
        known = self.pixel[rows]
        if ((known >= 0) & ((known != pixel) | (self.source[rows] != which))).any():
            raise Refused("a row of the result is made of several pixels")
        self.pixel[rows], self.source[rows] = pixel, which


def place_values(place: Place, rows: np.ndarray) -> np.ndarray:
    """The values of an index that depends only on the row, for each of these rows."""
    values = np.full(len(rows), place.offset, np.int64)
    for atom, n in place.terms:
        if atom == ROW:
            values += n * rows
        elif atom == COLUMN:
            raise Refused("which row of a block is read depends on the column")
        else:
            inner = place_values(atom[1], rows)
            values += n * (inner // atom[2] if atom[0] == "div" else inner % atom[2])
    return values
