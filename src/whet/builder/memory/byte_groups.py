"""Tensors that share bytes: each group is laid out relative to its lowest byte. Union-find with offsets."""

from __future__ import annotations


class Groups:
    """Names with sizes in bytes; `join` puts the smaller of two so many bytes into the larger."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        self._shift: dict[str, int] = {}  # bytes from the parent's beginning
        self._low: dict[str, int] = {}  # of a root: the lowest and highest byte of its group, counted from its own beginning
        self._high: dict[str, int] = {}
        self._size: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """A tensor on its own."""
        self._size[name] = nbytes
        self._low[name], self._high[name] = 0, nbytes

    def join(self, a: str, b: str, shift: int = 0) -> bool:
        """The smaller of two begins `shift` bytes into the larger (`b` is the part where they are equal). False: they lie otherwise already."""
        part, whole = (b, a) if self._size[b] <= self._size[a] else (a, b)
        (rp, at_part), (rw, at_whole) = self._find(part), self._find(whole)
        if rp == rw:
            return at_part == at_whole + shift
        move = at_whole + shift - at_part  # from the whole's root to the part's
        self._parent[rp], self._shift[rp] = rw, move
        self._low[rw] = min(self._low[rw], self._low[rp] + move)
        self._high[rw] = max(self._high[rw], self._high[rp] + move)
        return True

    def root(self, name: str) -> str:
        """The name that stands for the group."""
        return self._find(name)[0]

    def offset(self, name: str) -> int:
        """Bytes from the group's lowest byte to the tensor's first."""
        root, at = self._find(name)
        return at - self._low[root]

    def extent(self, root: str) -> int:
        """Bytes from the lowest to the highest byte of a root's group."""
        return self._high[root] - self._low[root]

    def _find(self, name: str) -> tuple[str, int]:
        at = 0
        while name in self._parent:
            at += self._shift[name]
            name = self._parent[name]
        return name, at
