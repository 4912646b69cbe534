"""Optimization profiles: min, opt and max shapes of the inputs, and layers with the symbols of one shape filled in."""

from __future__ import annotations

from collections.abc import Mapping

from whet.builder.config import BuildConfig
from whet.engine.plan import Profile
from whet.errors import NetworkError, ShapeError, UsageError
from whet.network import Dim, Layer, Network, Tensor, static_shape, substitute
from whet.ops import bind_layer, bind_symbols, infer_layer
from whet.registry import suggest_name

MIN, OPT, MAX = 0, 1, 2
_WINDOWS = {"Conv", "ConvTranspose", "DeformConv", "MaxPool", "AveragePool", "LpPool", "Col2Im"}  # an input may be smaller than their window
_CHECKED = frozenset({"Gemm", "MatMul", "Add", "Sub", "Mul", "Div", "Concat", "Reshape"} | _WINDOWS)  # their operands have to fit each other


def resolve_profiles(net: Network, config: BuildConfig) -> tuple[list[Profile], list[str]]:
    """The profiles of a build, every input in each, and notes for the user.

    An input that a profile does not name keeps its static shape; if that has symbols, each becomes 1, as in
    TensorRT's tools. Raises UsageError for an unknown input or min > opt or opt > max, ShapeError for shapes that do not fit.
    """
    notes: list[str] = []
    known = {t.name: t for t in net.inputs}
    profiles: list[Profile] = []
    for given in config.profiles or (({}, {}, {}),):
        for name in (n for shapes in given for n in shapes):
            if name not in known:
                raise UsageError(
                    f"the profile names an input {name!r}, unknown to the network.{suggest_name(name, known)} Inputs: {', '.join(known)}"
                )
        full: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {}
        for name, t in known.items():
            shapes = [s.get(name) for s in given]
            filled = next((s for s in (shapes[OPT], shapes[MAX], shapes[MIN]) if s is not None), None)
            if filled is None and not t.type.static:
                filled = _fill_with_ones(t)
                notes.append(f"input '{name}' is {t.type}, and no profile gives its shape: the engine is built for {list(filled)}. Use --optShapes.")
            filled = filled if filled is not None else static_shape(t.shape)
            low, opt, high = (tuple(int(d) for d in (s if s is not None else filled)) for s in shapes)
            if not len(low) == len(opt) == len(high) == t.type.rank:
                raise ShapeError(f"input '{name}' is {t.type}; the profile's shapes {list(low)}, {list(opt)}, {list(high)} have another rank")
            if not all(a <= b <= c for a, b, c in zip(low, opt, high, strict=True)):
                raise UsageError(f"input '{name}': the profile needs min <= opt <= max in every axis, not {list(low)}, {list(opt)}, {list(high)}")
            full[name] = (low, opt, high)
        profile = Profile(full)
        for which in (MIN, OPT, MAX):
            _check_operands(net, bind_profile_symbols(net, profile, which), {n: s[which] for n, s in profile.shapes.items()})
        profiles.append(profile)
    return profiles, notes


def _fill_with_ones(t: Tensor) -> tuple[int, ...]:
    """The shape of an input with 1 for every symbol."""
    return static_shape(tuple(substitute(d, dict.fromkeys(t.type.symbols(), 1)) for d in t.shape))


def describe_assumed_shapes(net: Network, config: BuildConfig) -> str:
    """A hint for a failed build: inputs with dynamic sizes that no profile gives, so that the build takes 1; "" for none."""
    named = {n for profile in config.profiles for shapes in profile for n in shapes}
    assumed = [t for t in net.inputs if not t.type.static and t.name not in named]
    if not assumed:
        return ""
    shapes = ", ".join(f"'{t.name}' {t.type} as {list(_fill_with_ones(t))}" for t in assumed)
    return f"No shapes were given, so dynamic sizes became 1: {shapes}. The model may not accept that; give its usual sizes with --optShapes."


def _check_operands(net: Network, env: Mapping[str, Dim], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ShapeError if the operands of a product, sum or Concat do not fit each other in these shapes, if a Reshape is for another number of
    elements, or if an image is smaller than a window: a classifier or position embeddings made for another image size, or a batch size that the
    exporter fixed."""
    for layer in net.layers:
        if layer.op in _CHECKED and not all(t is None or t.type.static for t in layer.inputs):
            try:
                infer_layer(bind_layer(layer, env))
            except NetworkError as e:
                given = ", ".join(f"'{n}' {list(s)}" for n, s in shapes.items())
                raise ShapeError(f"the network cannot take {given}: {e}. Give the input shapes that the model was made for.") from e


def bind_profile_symbols(net: Network, profile: Profile, which: int) -> dict[str, int]:
    """Values of the symbols at a profile's min (0), opt (1) or max (2) shapes. Raises ShapeError."""
    return bind_symbols([(t.name, t.type) for t in net.inputs], {n: s[which] for n, s in profile.shapes.items()})


def bound_layers(net: Network, env: Mapping[str, Dim]) -> dict[str, Layer]:
    """Each layer with static shapes, by name; the network is not changed."""
    return {layer.name: bind_layer(layer, env) for layer in net.layers}
