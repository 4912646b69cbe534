"""Registers an op of a package outside whet, with its tactics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from whet.errors import UsageError
from whet.ops import OPS, Op, op
from whet.ops._base import Infer, Reference
from whet.plugin_packages import get_or_add_package
from whet.tactics import TACTICS, Tactic

_NAME = re.compile(r"[A-Za-z_]\w*")
_DOMAIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OF_ONNX = frozenset({"ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training"})


def register(
    name: str,
    infer: Infer,
    reference: Reference,
    *,
    domain: str,
    package_name: str = "",
    version: str = "",
    tactics: Sequence[Tactic] = (),
    attrs: Mapping[str, Any] | None = None,
    samples: Sequence[Any] = (),
    **optional: Any,
) -> Op:
    """Registers the op `<domain>.<name>`; ONNX nodes of this type in this domain become layers of it.

    `infer(layer)` gives the output type(s), `reference(layer, *arrays)` the output array(s) in NumPy (None for an absent input).
    `tactics` compute it: NumpyTactic, LlvmTactic, CudaTactic, TritonTactic, CupyTactic, or classes derived from whet.tactics.Tactic. The reference
    itself is always a tactic on CPUs. `attrs` are attributes with their defaults, or a kind of whet.ops (REQUIRED, OPTIONAL).
    `samples` are (inputs, attributes) pairs as in whet.ops.Sample; `whet.plugins.check_samples` runs every tactic on them.
    `optional` are further fields of whet.ops.Op: couples, inner, recut (pruning), shape_value, onnx, onnx_ops, to_onnx, zeros, pointwise.
    `package_name` and `version` are written into engines. Default: the top-level package that defines `infer`, and the version of its distribution.

    Raises UsageError for a name that is taken, a domain of ONNX, an unknown field, or a package without a version.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"register: the op's name {name!r} is not an identifier; give the op_type of the ONNX node, and the domain as domain=")
    if not _DOMAIN.fullmatch(domain) or domain in _OF_ONNX:
        raise UsageError(f"register: domain={domain!r} is not a domain of your own, such as 'com.example'; ONNX's own ops are whet's")
    known = set(Op.__dataclass_fields__) - {"name", "infer", "reference", "samples", "attrs"}
    if unknown := sorted(set(optional) - known):
        raise UsageError(f"register: an op has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    full = f"{domain}.{name}"
    if full in OPS:
        raise UsageError(f"register: the op {full} is registered already. Register it once, at the top of a module of its package.")
    home = package_name or infer.__module__.partition(".")[0]
    names: list[str] = []
    for t in tactics:
        if not isinstance(t, Tactic):
            kinds = "instances of the classes of whet.plugins or of whet.tactics.Tactic"
            raise UsageError(f"register: a tactic of {full} is of type {type(t).__name__}; give {kinds}")
        names.append(f"{t.backend}/{home}.{t.name.rpartition('/')[2] or type(t).__name__}")
        if names[-1] in TACTICS or names.count(names[-1]) > 1:
            raise UsageError(f"register: two tactics are called {names[-1]}; give each a name of its own")
    held = get_or_add_package(home, version or _get_version(home))
    registered = op(full, infer, reference, samples=samples, attrs=dict(attrs or {}), **({"to_onnx": _write_node} | optional))
    held.ops.append(full)
    for t, tactic_name in zip(tactics, names, strict=True):
        t.ops, t.name = (full,), tactic_name
        TACTICS[t.name] = t
        held.tactics.append(t.name)
        if hasattr(t, "registered"):
            t.registered(held)
    return registered


def _get_version(package_name: str) -> str:
    """The version of the installed distribution with this top-level package."""
    for distribution in metadata.packages_distributions().get(package_name, [package_name]):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise UsageError(f"register: no installed distribution has the package {package_name!r}; give package_name= and version=, which engines name")


def _write_node(layer: Any, writer: Any) -> None:
    """The layer as one node of its domain with the same attributes."""
    domain, _, name = layer.op.rpartition(".")
    ins, outs = [writer.name(t) for t in layer.inputs], [writer.name(t) for t in layer.outputs]
    writer.node(name, ins, outs, name=layer.name, domain=domain, **layer.attrs)
