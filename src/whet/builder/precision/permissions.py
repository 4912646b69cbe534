"""Permissions: the storage types that a build may use besides a tensor's own, the layers with a demanded precision, and kernels for 2:4 weights.

--layerPrecisions=x:int8 binds like x:fp16: the layer computes on 8-bit integers, or the build fails (obey) or warns (prefer).
x:fp32 keeps a layer in floating point that calibration or the model's Q/DQ would quantize. A pattern with wildcards
(*:int8) binds the layers that can compute in that type, and a note names the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from whet.backends import get_backend, get_capabilities
from whet.builder.config import BuildConfig
from whet.engine.report import PermissionUse
from whet.errors import BackendError, BuildError, UsageError
from whet.network import BF16, F8E4M3, F16, F32, I8, U8, DType, Layer
from whet.sparsity.report import is_sparse
from whet.tactics import Signature, Tactic, get_root_layer, is_quantized, list_tactics

#: flag -> storage types that it permits for f32 tensors of the network. int8 and fp8 come with Q/DQ in the network or calibration.
_PERMITS: dict[str, tuple[DType, ...]] = {"fp32": (), "fp16": (F16,), "bf16": (BF16,), "int8": (), "fp8": (), "best": (F16, BF16)}
_STORAGE: dict[str, DType] = {"fp32": F32, "fp16": F16, "bf16": BF16, "int8": I8, "fp8": F8E4M3}
_QUANTIZED = (I8, F8E4M3)
_NO_FLOAT8 = "no tactic of this backend computes in FP8: it has no fast kernels here, only an emulation (whet debug precision --fp8)"
_FLAG = {F16: "--fp16", BF16: "--bf16"}


@dataclass
class Permissions:
    """The permissions and demands of a BuildConfig. `used` collects the layers that met a demand, for the report."""

    allowed: frozenset[DType]
    demands: tuple[tuple[str, DType], ...] = ()  # (layer or node name pattern, storage type), in force
    outputs: tuple[tuple[str, DType], ...] = ()
    obey: bool = False
    given: tuple[str, ...] = field(default=())
    sparse: bool = True  # kernels that compute with 2:4 weights

    @staticmethod
    def of(config: BuildConfig) -> Permissions:
        """Raises UsageError for an unknown precision."""
        allowed: set[DType] = set()
        for p in config.precisions:
            if p not in _PERMITS:
                raise UsageError(f"unknown precision {p!r}; precisions: {', '.join(_PERMITS)}")
            allowed.update(_PERMITS[p])
        force = config.precision_constraints != "none"
        demands = tuple((n, _get_storage_type(p)) for n, p in config.layer_precisions) if force else ()
        outputs = tuple((n, _get_storage_type(p)) for n, p in config.layer_output_types) if force else ()
        obey, sparse = config.precision_constraints == "obey", config.sparsity != "disable"
        return Permissions(frozenset(allowed), demands, outputs, obey, tuple(config.precisions), sparse)

    def refuses_tactic(self, name: str) -> str | None:
        """The reason why a tactic is not permitted, or None."""
        return "kernels for 2:4 weights are off: --sparsity=enable permits them" if not self.sparse and is_sparse(name, ()) else None

    def refuses(self, layer: Layer, signature: Signature) -> str | None:
        """The reason why a signature's storage types are not permitted for a layer, or None."""
        demanded, output = self.demanded(layer), self.get_demanded_output_type(layer)
        pairs = [*zip(layer.inputs, signature.inputs, strict=True), *zip(layer.outputs, signature.outputs, strict=True)]
        for t, o in pairs:
            if t is None or o is None or o.dtype == t.dtype:
                continue
            if t.dtype != F32 or o.dtype not in _FLAG:
                return f"stores {t.dtype} %{t.name} as {o.dtype}, which no flag permits"
            if o.dtype not in self.allowed and o.dtype not in (demanded, output):
                return f"{o.dtype} storage is not permitted ({_FLAG[o.dtype]})"
        if demanded is not None and self.obey and get_compute_type(layer, signature) not in (None, demanded):
            return f"--layerPrecisions demands {demanded} for '{layer.name}'{_describe_missing_condition(demanded)}"
        if self.obey and not self._gives(layer, signature, output):
            return f"--layerOutputTypes demands {output} of '{layer.name}'"
        return None

    def meets(self, layer: Layer, signature: Signature) -> bool:
        """True when a signature meets --layerPrecisions and --layerOutputTypes for the layer."""
        demanded = self.demanded(layer)
        computes = demanded is None or get_compute_type(layer, signature) in (None, demanded)
        return computes and self._gives(layer, signature, self.get_demanded_output_type(layer))

    @staticmethod
    def _gives(layer: Layer, signature: Signature, output: DType | None) -> bool:
        """True when all floating-point outputs are stored as `output` (None: any type)."""
        if output is None:
            return True
        if is_quantized(layer) and all(t.dtype in (I8, U8) for t in layer.outputs):
            return output == I8
        floats = [o.dtype for t, o in zip(layer.outputs, signature.outputs, strict=True) if t.dtype.is_float]
        return all(d == output for d in floats)

    def demanded(self, layer: Layer) -> DType | None:
        """The storage type that --layerPrecisions gives a layer, by its name or a source node's; the last match wins."""
        return _find_last_demand_for(self.demands, layer)

    def get_demanded_output_type(self, layer: Layer) -> DType | None:
        """The storage type that --layerOutputTypes gives a layer's outputs."""
        return _find_last_demand_for(self.outputs, layer)

    def key(self, layer: Layer) -> str:
        """The part of the permissions that distinguishes layers of equal text."""
        return f"{self.demanded(layer)} {self.get_demanded_output_type(layer)} {self.is_demanded_by_wildcard(layer)}"

    def is_demanded_by_wildcard(self, layer: Layer) -> bool:
        """True if a demand that holds for the layer is a pattern with wildcards."""
        matches = (_match(demands, _list_names(layer), _is_inserted(layer)) for demands in (self.demands, self.outputs))
        return any(m is not None and _has_wildcard(m[0]) for m in matches)

    def without_wildcards(self) -> Permissions:
        """The same permissions with only the demands that name a layer exactly."""
        demands, outputs = (tuple(d for d in ds if not _has_wildcard(d[0])) for ds in (self.demands, self.outputs))
        return replace(self, demands=demands, outputs=outputs)


def _list_names(layer: Layer) -> tuple[str, ...]:
    return (layer.name, *layer.name.split(" + "), *layer.sources)


def _has_wildcard(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def _is_inserted(layer: Layer) -> bool:
    """True for Q/DQ layers that whet inserted: they belong to no node of the model, so wildcards do not mean them."""
    return layer.op in ("QuantizeLinear", "DequantizeLinear") and not layer.sources


def _find_last_demand_for(demands: tuple[tuple[str, DType], ...], layer: Layer) -> DType | None:
    return _find_last_demand(demands, _list_names(layer), _is_inserted(layer))


def _find_last_demand(demands: tuple[tuple[str, DType], ...], names: Iterable[str], exact: bool = False) -> DType | None:
    found = _match(demands, names, exact)
    return None if found is None else found[1]


def _match(demands: tuple[tuple[str, DType], ...], names: Iterable[str], exact: bool = False) -> tuple[str, DType] | None:
    """The last (pattern, type) that matches a name; `exact` ignores patterns with wildcards."""
    known, found = tuple(names), None
    for pattern, dtype in demands:
        if not (exact and _has_wildcard(pattern)) and any(fnmatchcase(name, pattern) for name in known):
            found = pattern, dtype
    return found


def _describe_missing_condition(demanded: DType) -> str:
    """The missing condition of an unmet demand for 8 bits."""
    if demanded == I8:
        return ": it is not quantized (8 bits are for convolutions and products with constant weights that have ranges)"
    return ": it is no layer of FP8 (Q/DQ in the network or --fp8 with calibration, on a GPU that has kernels for it)" if demanded == F8E4M3 else ""


def get_compute_type(layer: Layer, signature: Signature) -> DType | None:
    """The type that a layer computes in: I8 for a quantized one, else the type of its first float operand; None if there is neither."""
    if is_float8(layer):
        return F8E4M3
    return I8 if computes_on_integers(layer) else get_operand_type(layer, signature)


def computes_on_integers(layer: Layer) -> bool:
    """True for a quantized layer or a fused layer that contains one."""
    return is_quantized(layer) or (layer.op == "Fused" and any(is_quantized(x) for x in layer.regions["body"].layers))


def make_integer_demand_predicate(config: BuildConfig) -> Callable[[Layer], bool]:
    """A predicate for layers of the source network that --layerPrecisions demands in INT8."""
    permissions = Permissions.of(config)
    return lambda layer: permissions.demanded(layer) == I8


def make_named_integer_predicate(config: BuildConfig) -> Callable[[Layer], bool]:
    """A predicate for layers that --layerPrecisions demands in INT8 by an exact name."""
    permissions = Permissions.of(config)
    return lambda layer: permissions.demanded(layer) == I8 and not permissions.is_demanded_by_wildcard(layer)


def make_float_demand_predicate(config: BuildConfig) -> Callable[[Layer], bool]:
    """A predicate for layers of the source network that --layerPrecisions keeps in floating point."""
    permissions = Permissions.of(config)
    return lambda layer: permissions.demanded(layer) not in (None, *_QUANTIZED)


def make_integer_ban(config: BuildConfig) -> Callable[[Layer], str | None] | None:
    """A predicate that returns why a fused integer layer violates --layerPrecisions or --layerOutputTypes; None if neither flag is given."""
    permissions = Permissions.of(config)
    if not permissions.demands and not permissions.outputs:
        return None

    def find_reason(layer: Layer) -> str | None:
        if not is_quantized(layer):
            return None
        body = layer.regions["body"].layers
        names = [n for x in body if x.op not in ("QuantizeLinear", "DequantizeLinear") for n in (x.name, *x.name.split(" + "), *x.sources)]
        demanded = _find_last_demand(permissions.demands, names)
        if demanded not in (None, I8):
            return f"--layerPrecisions keeps '{names[0]}' in {demanded}"
        output = _find_last_demand(permissions.outputs, names)
        if output not in (None, I8) and body[-1].op == "QuantizeLinear":
            return f"--layerOutputTypes keeps the outputs of '{names[0]}' in {output}"
        return None

    return find_reason


def is_float8(layer: Layer) -> bool:
    """True for a fused layer that reads or stores scaled e4m3 values."""
    if not is_quantized(layer):
        return False
    return any(t is not None and t.dtype == F8E4M3 for x in layer.regions["body"].layers for t in (*x.outputs, x.inputs[0]))


def has_float8(config: BuildConfig) -> bool:
    """True when the build's backend has FP8 kernels."""
    if not get_capabilities(config.backend).executes:
        return True
    return any(t.float8 for t in list_tactics(config.backend)) and _explain_old_device(config) is None


def explain_missing_float8(layer: Layer, config: BuildConfig) -> str | None:
    """The reason why a fused FP8 layer has no kernel on the backend; None for other layers, and if a kernel accepts it."""
    if not get_capabilities(config.backend).executes or not is_float8(layer):
        return None
    reasons = []
    for t in list_tactics(config.backend):
        if not t.quantized:
            continue
        reason = t.why_not(layer)
        if reason is None:
            return _explain_old_device(config)
        if get_root_layer(layer).op in t.ops:
            reasons.append(f"{t.name}: {reason}")
    details = f" ({'; '.join(reasons)})" if reasons else ""
    return f"no kernel of {config.backend} computes this layer in FP8{details}: its values are rounded to e4m3 and computed in floating point"


def _explain_old_device(config: BuildConfig) -> str | None:
    """The reason why the device has no FP8 kernels although its backend has some."""
    if F8E4M3.name in get_capabilities(config.backend).unsupported_types:
        return None  # no device of this backend has them
    try:
        if F8E4M3.name not in get_backend(config.backend).capabilities.unsupported_types:
            return None
    except BackendError:
        return None  # nothing runs on this machine: the engine is for a GPU elsewhere
    return "FP8 kernels are for Hopper's tensor cores (sm_90a): values are rounded to e4m3 and computed in floating point"


def get_operand_type(layer: Layer, signature: Signature) -> DType | None:
    """The storage type of the first float operand that the layer computes with; None for a layer without floats."""
    for t, o in [*zip(layer.inputs, signature.inputs, strict=True), *zip(layer.outputs, signature.outputs, strict=True)]:
        if t is not None and o is not None and t.dtype.is_float:
            return o.dtype
    return None


def _get_storage_type(precision: str) -> DType:
    if precision not in _STORAGE:
        raise UsageError(f"layers can be demanded in {', '.join(_STORAGE)}, not {precision!r}")
    return _STORAGE[precision]


def explain_missing_integer_kernels(tactics: Iterable[Tactic]) -> str | None:
    """The reasons why this machine cannot run tactics for quantized convolutions and products, or None."""
    reasons = {t.unavailable() for t in tactics if {"Conv", "Gemm", "MatMul"} & set(t.ops) and t.quantized} - {None}
    return "; ".join(sorted(filter(None, reasons))) or None


def _explain_no_integers(config: BuildConfig, signatures: Mapping[str, tuple[Layer, Signature]]) -> str:
    """The reason why no layer computes on 8-bit integers: the network is not quantized, or this machine has no kernels."""
    quantized = any(layer.op == "QuantizeLinear" or is_quantized(layer) for layer, _ in signatures.values())
    missing = explain_missing_integer_kernels(list_tactics(config.backend)) if quantized else None
    if missing:
        return f"this machine has no exact 8-bit kernels ({missing}), so that quantized layers compute in floating point"
    return "INT8 needs Q/DQ nodes in the network or calibration (--calibData, --calib)"


def report_precisions(config: BuildConfig, signatures: dict[str, tuple[Layer, Signature]]) -> dict[str, PermissionUse]:
    """For each permission: the number of layers that use it, and the reason if none does. Raises BuildError under `strict`."""
    ran = [get_operand_type(layer, s) for layer, s in signatures.values()]
    integers = sum(1 for layer, _ in signatures.values() if computes_on_integers(layer))
    float8 = sum(1 for layer, _ in signatures.values() if is_float8(layer))
    report: dict[str, PermissionUse] = {}
    for p in dict.fromkeys(config.precisions):
        kinds = _PERMITS[p]
        used = sum(1 for d in ran if d is not None and d in kinds)
        if p in ("int8", "best"):
            used += integers - (float8 if p == "int8" else 0)
        if p == "fp8":
            used += float8
        reason = ""
        little = 2 * integers > len(ran) and any(k.name not in get_capabilities(config.backend).unsupported_types for k in kinds)
        if not used and not little:  # in a mostly quantized network, unused 16-bit types are not worth a note
            reason = {
                "int8": _explain_no_integers(config, signatures),
                "fp8": "FP8 needs Q/DQ nodes in the network or calibration (--calibData, --calib)" if has_float8(config) else _NO_FLOAT8,
                "fp32": "",
            }.get(p, f"no tactic with {' or '.join(k.name for k in kinds)} storage ran or won on this machine")
            if reason and config.strict:
                raise BuildError(f"--{p} cannot be used: {reason}. Leave out --strict to build without it.")
        report[p] = PermissionUse(used, len(ran), reason)
    return report
