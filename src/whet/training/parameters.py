"""Classification of constants: trained weights, batch-norm statistics, fixed values; and their torch names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from whet.errors import UsageError
from whet.network import F32, Layer, Network, Tensor
from whet.registry import suggest_name

#: Input indices that are weights by the op's definition.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Einsum": (0, 1),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "QuantizeLinear": (0,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
_STATISTICS = {"BatchNormalization": (3, 4)}
#: Ops whose constant operands may be weights or plain constants (anchors, grids, pixel normalization): decided by name.
_ARITHMETIC = ("Add", "Concat", "Div", "Expand", "Mul", "Sub")
#: Exporter names of constants that are not parameters: /Constant_output_0, onnx::Mul_7, val_3.
_ANONYMOUS = re.compile(r"/.*|.*::.*|[a-z]*_?\d+")
_NOT_TRAINED = ("anchor", "grid", "prior", "stride", "constant", "mask", "position_ids")


def is_weight(layer: Layer, i: int) -> bool:
    """True if input `i` of `layer` is a trainable weight."""
    t = layer.inputs[i]
    if t is None or t.weight is None or t.dtype != F32:
        return False
    if i in _WEIGHTS.get(layer.op, ()):
        return True
    if layer.op not in _ARITHMETIC or t.array().size < 2:
        return False
    others = [x.maker.op for k, x in enumerate(layer.inputs) if k != i and x is not None and x.maker is not None]
    vector = sum(d != 1 for d in t.shape) == 1
    if layer.op == "Add" and vector and any(op in ("Conv", "ConvTranspose", "MatMul") for op in others):
        return True  # a separate bias layer
    return not _ANONYMOUS.fullmatch(t.name) and not any(w in t.name.lower() for w in _NOT_TRAINED)


def is_statistic(layer: Layer, i: int) -> bool:
    """True if input `i` of `layer` is a running statistic (mean or variance)."""
    return i in _STATISTICS.get(layer.op, ())


def sort_constants(net: Network, freeze: Iterable[str] = (), train: Iterable[str] = ()) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Returns the (trained, statistic, fixed) constants of the network, in order.

    `freeze` and `train` are shell-style name patterns that override the classification; `freeze` has priority.
    Raises UsageError for a pattern that matches no float constant.
    """
    roles: dict[Tensor, str] = {}
    for layer in net.layers:
        for i, t in enumerate(layer.inputs):
            if t is not None and t.weight is not None:
                if is_statistic(layer, i):
                    roles[t] = "measured"
                elif is_weight(layer, i):
                    roles.setdefault(t, "trained")
    freeze, train = tuple(freeze), tuple(train)
    floats = [t for t in net.constants.values() if t.dtype == F32]
    for pattern in (*freeze, *train):
        if not any(fnmatchcase(t.name, pattern) for t in floats):
            raise UsageError(f"no weight is called {pattern!r}.{suggest_name(pattern, [t.name for t in floats])}")
    for t in floats:
        if roles.get(t) != "measured" and any(fnmatchcase(t.name, p) for p in train):
            roles[t] = "trained"
        if roles.get(t) == "trained" and any(fnmatchcase(t.name, p) for p in freeze):
            roles[t] = "fixed"
    found: dict[str, list[Tensor]] = {"trained": [], "measured": [], "fixed": []}
    for t in net.constants.values():
        found[roles.get(t, "fixed")].append(t)
    return found["trained"], found["measured"], found["fixed"]


def make_torch_names(tensors: Iterable[Tensor]) -> dict[Tensor, str]:
    """A valid torch name for each tensor: its own where possible; otherwise dots and empty parts become `_`.

    `layer1.0.conv1.weight` is unchanged, so the state dict matches that of the exported model.
    """
    every = list(tensors)
    inner = {".".join(parts[:k]) for t in every for parts in [t.name.split(".")] for k in range(1, len(parts))}
    made: dict[Tensor, str] = {}
    taken: set[str] = set()

    def fits(name: str) -> bool:
        return name not in inner and all(_is_free_name(p) for p in name.split("."))

    for t in every:
        name = t.name if fits(t.name) else "".join(c if c.isalnum() else "_" for c in t.name) or "weight"
        while name in taken or name in inner:
            name += "_"
        taken.add(name)
        made[t] = name
    return made


def _is_free_name(part: str) -> bool:
    """True if a torch module can have an attribute of that name without shadowing its own."""
    return bool(part) and part not in ("training", "forward", "T_destination", "call_super_init", "dump_patches") and not part.startswith("_")
