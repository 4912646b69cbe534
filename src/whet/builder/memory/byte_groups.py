"""Groups of tensors that share bytes, with offsets relative to the lowest byte of the group: union-find with offsets."""

from __future__ import annotations


class Groups:
    """Tensor names with sizes in bytes, merged into groups."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}
        self._shift: dict[str, int] = {}  # byte offset from the parent's start
        self._low: dict[str, int] = {}  # of a root: lowest byte of its group, as an offset from the root's start
        self._high: dict[str, int] = {}
        self._size: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> None:
        """Adds a tensor as a group of its own."""
        self._size[name] = nbytes
        self._low[name], self._high[name] = 0, nbytes

    def join(self, a: str, b: str, shift: int = 0) -> bool:
        """Places the smaller tensor `shift` bytes into the larger (`b` into `a` for equal sizes). False: the group already has another offset."""
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
        """The representative of the group."""
        return self._find(name)[0]

    def offset(self, name: str) -> int:
        """The tensor's offset in its group, in bytes."""
        root, at = self._find(name)
        return at - self._low[root]

    def get_extent(self, root: str) -> int:
        """The size of a root's group in bytes."""
        return self._high[root] - self._low[root]

    def _find(self, name: str) -> tuple[str, int]:
        """The root of a name's group and the name's offset from it. The names on the way become children of the root."""
        path = []
        while name in self._parent:
            path.append(name)
            name = self._parent[name]
        at = 0
        for n in reversed(path):
            at += self._shift[n]
            self._parent[n], self._shift[n] = name, at
        return name, at
