"""Banned kernels, which failed at run time or computed wrong results, and storage types that cannot hold a tensor's values."""

from __future__ import annotations

from collections.abc import Sequence

from whet.measure.option import Ident, Option
from whet.network import Layer
from whet.tactics import Signature

#: Failed configurations of a tactic after which its others are banned too: each failure costs a build and a verification.
_FAILED_CONFIGURATIONS = 4


class Bans:
    """Options banned by kind of layer, with reasons. `listed` has a row (layer, option, reason) for the report."""

    def __init__(self) -> None:
        self.listed: list[tuple[str, str, str]] = []
        self._reasons: dict[tuple[str, Ident], str] = {}
        self._storage: dict[tuple[str, str], str] = {}  # (tensor, type) -> reason

    def reason(self, kind: str, o: Option) -> str | None:
        """Why an option is banned for a kind of layer, or None."""
        return self._reasons.get((kind, o.ident))

    def storage_reason(self, layer: Layer, signature: Signature) -> str | None:
        """Why a layer may not store its tensors in the types of a signature, or None. A constant is packed in the type of the computed tensors."""
        if not self._storage:
            return None
        pairs = [*zip(layer.inputs, signature.inputs, strict=True), *zip(layer.outputs, signature.outputs, strict=True)]
        computed = {o.dtype.name for t, o in pairs if t is not None and o is not None and not t.is_constant}
        for t, o in pairs:
            if t is None or (o is None and not t.is_constant):
                continue
            for dtype in sorted(computed) if o is None or t.is_constant else (o.dtype.name,):
                if (reason := self._storage.get((t.name, dtype))) is not None:
                    return reason
        return None

    def ban_storage(self, tensor: str, layer: str, dtype: str, reason: str) -> bool:
        """Bans a storage type of a tensor, which `layer` computes; False if it is banned already."""
        if (tensor, dtype) in self._storage:
            return False
        self._storage[tensor, dtype] = reason
        self.listed.append((layer, f"{dtype} storage of %{tensor}", reason))
        return True

    def ban(self, kind: str, layer: str, ident: Ident, options: Sequence[Option], reason: str) -> None:
        """Bans one of a kind's `options`, and the other configurations of its tactic once several of them have failed."""
        self._reasons[kind, ident] = reason
        self.listed.append((layer, f"{ident[0]} {ident[1]} {dict(ident[2])}", reason))
        configurations = [o.ident for o in options if o.ident[:2] == ident[:2]]
        failed = sum((kind, i) in self._reasons for i in configurations)
        if failed >= _FAILED_CONFIGURATIONS:
            for other in configurations:
                self._reasons.setdefault((kind, other), f"{failed} other configurations of this tactic failed here, the last: {reason}")

    def ban_tactic(self, kind: str, layer: str, tactic: str, options: Sequence[Option], reason: str) -> bool:
        """Bans all of a kind's `options` by one tactic. Bans nothing and returns False if no other kernel would remain."""
        remaining = [o for o in options if (kind, o.ident) not in self._reasons]
        if not any(o.tactic.name != tactic and not o.tactic.fallback for o in remaining):
            return False
        self._reasons.update({(kind, o.ident): reason for o in remaining if o.tactic.name == tactic})
        self.listed.append((layer, tactic, reason))
        return True
