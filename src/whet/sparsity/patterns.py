"""Sparsity patterns: N of every M inputs, blocks, and templates given as small arrays. One mask per weight, by scores.

A pattern is laid out as tiles over a matrix [output channels, input channels], of a convolution once per kernel position, as 2:4 kernels read it.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.errors import UsageError
from whet.files import read_bounded
from whet.sparsity.two_four import is_two_four

_LARGEST_FILE, _LARGEST_TILE = 1 << 20, 1 << 12  # bytes; elements of a template
_SYNTAX = "2:4 (two of every four inputs stay), block:4x1 (blocks of four output channels and one input), or template:FILE (YAML or JSON)"


@dataclass(frozen=True)
class Pattern(ABC):
    """A pattern with tiles of `tile` (output channels, input channels)."""

    name: str
    tile: tuple[int, int]

    @abstractmethod
    def keep(self, tiles: np.ndarray) -> np.ndarray:
        """True for the kept weights; scores float [..., rows of tiles, columns of tiles, tile height, tile width], the mask has this shape."""

    @property
    def is_two_four(self) -> bool:
        """True if each mask of this pattern is 2:4 for any scores, so that 2:4 kernels run it."""
        return False

    def mask(self, scores: np.ndarray) -> np.ndarray:
        """The mask, bool, of scores float [..., output channels, input channels]. Raises ValueError unless the axes are multiples of the tile."""
        height, width = self.tile
        *leading, outputs, inputs = scores.shape
        if outputs % height or inputs % width:
            raise ValueError(f"{outputs} output and {inputs} input channels are no multiples of {height} and {width}")
        tiles = scores.reshape(*leading, outputs // height, height, inputs // width, width).swapaxes(-3, -2)
        return self.keep(tiles).swapaxes(-3, -2).reshape(scores.shape)


@dataclass(frozen=True)
class NOfM(Pattern):
    """The `n` highest scores of every `m` adjacent inputs of an output channel stay (ties: the earlier ones)."""

    n: int
    m: int

    @property
    def is_two_four(self) -> bool:
        return self.n * (4 // self.m) <= 2 if self.m in (1, 2, 4) else self.m % 4 == 0 and self.n <= 2

    def keep(self, tiles: np.ndarray) -> np.ndarray:
        order = np.argsort(-tiles, axis=-1, kind="stable")
        kept = np.zeros(tiles.shape, bool)
        np.put_along_axis(kept, order[..., : self.n], True, axis=-1)
        return kept


@dataclass(frozen=True)
class Blocks(Pattern):
    """Whole blocks stay or go: the `ratio` (0..1) of the blocks of each weight with the lowest sum of scores is zero."""

    ratio: float

    def keep(self, tiles: np.ndarray) -> np.ndarray:
        sums = tiles.sum((-2, -1))
        kept = np.ones(sums.size, bool)
        kept[np.argsort(sums, axis=None, kind="stable")[: round(self.ratio * sums.size)]] = False
        return np.broadcast_to(kept.reshape(sums.shape)[..., None, None], tiles.shape)


@dataclass(frozen=True)
class Template(Pattern):
    """Each tile has the positions of one of the alternatives, bool [alternatives, height, width]: that with the highest sum of scores."""

    alternatives: np.ndarray

    @property
    def is_two_four(self) -> bool:
        width = self.tile[1]
        if width % 4 and width not in (1, 2):
            return False
        if width % 4:  # any two alternatives may be adjacent
            return int(self.alternatives.sum(-1).max()) * (4 // width) <= 2
        return all(is_two_four(a, 1) for a in self.alternatives)

    def keep(self, tiles: np.ndarray) -> np.ndarray:
        sums = np.einsum("...hw,ahw->...a", tiles, self.alternatives)
        return self.alternatives[sums.argmax(-1)]


def parse_pattern(text: str, ratio: float) -> Pattern:
    """The pattern of `--pattern`; `ratio` (0..1) is the share of the blocks to set to zero. Raises UsageError."""
    if match := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = int(match[1]), int(match[2])
        if not 0 < n < m:
            raise UsageError(f"--pattern={text}: N:M keeps N of every M inputs, so N is from 1 to M - 1")
        return NOfM(text, (1, m), n, m)
    if match := re.fullmatch(r"block:(\d+)x(\d+)", text):
        height, width = int(match[1]), int(match[2])
        if not height * width:
            raise UsageError(f"--pattern={text}: a block has at least one output channel and one input")
        return Blocks(text, (height, width), ratio)
    if text.startswith("template:"):
        path = text.removeprefix("template:")
        alternatives = read_template(path)
        return Template(f"template:{os.path.basename(path)}", alternatives.shape[1:], alternatives)
    raise UsageError(f"--pattern={text} is no pattern; write {_SYNTAX}")


def read_template(path: str | os.PathLike[str]) -> np.ndarray:
    """A file with a template, as bool [alternatives, output channels, input channels].

    YAML or JSON: rows of zeros and ones (`[[1, 1, 0, 0], [0, 0, 1, 1]]`), one row alone, or `alternatives:` with a list of such arrays of one
    shape. Raises UsageError for a file that cannot be read, and for templates that are empty, too large, or keep nothing.
    """
    try:
        data = _load(read_bounded(path, _LARGEST_FILE).decode(), path)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--pattern=template:{path} cannot be read: {e.strerror if isinstance(e, OSError) else 'it is no text'}") from e
    given = data.get("alternatives") if isinstance(data, dict) else [data]
    if not isinstance(given, list) or not given:
        raise UsageError(f"{path}: write rows of zeros and ones, or `alternatives:` with a list of such arrays")
    try:
        arrays = [np.atleast_2d(np.array(a)) for a in given]
        same = np.stack(arrays)
    except ValueError:
        raise UsageError(f"{path}: the rows of a template, and the templates of `alternatives`, have one length") from None
    if same.ndim != 3 or not same.size:
        raise UsageError(f"{path}: the template is empty" if not same.size else f"{path}: a template has one or two axes, not {same.ndim - 1}")
    if same.size > _LARGEST_TILE:
        raise UsageError(f"{path}: the template is too large: {same.size} elements, the most is {_LARGEST_TILE}")
    if same.dtype.kind not in "iub" or not np.isin(same, (0, 1)).all():
        raise UsageError(f"{path}: a template holds zeros and ones only")
    if not same.any((1, 2)).all():
        raise UsageError(f"{path}: a template that is all zero keeps no weight")
    return same.astype(bool)


def _load(text: str, path: str | os.PathLike[str]) -> Any:
    try:
        import yaml
    except ImportError:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError("YAML templates need PyYAML: pip install 'whet[search]' (a JSON template needs nothing)") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # ValueError: an integer of thousands of digits, a date that does not exist
        raise UsageError(f"{path}: the template is no YAML: {' '.join(str(e).split())[:200]}") from e
