"""Resize: x resampled by `scales` (input 2) or to `sizes` (input 3), or by attributes of the same names, along `axes`."""

from fractions import Fraction

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import floordiv
from whet.ops._axes import make_attribute_exporter, needs_opset
from whet.ops._base import FLOATS, INTS, Couple, find_given_dims, find_known_values, get_op, op, replace_given, to_ints
from whet.ops._resize import COORDINATES, MODES, ROUNDING, Resampling
from whet.ops._types import normalize_axis, require_float_input, require_numeric_input


def resize_targets(layer):
    """(output size, scale) of each axis of x; scale None means output size / input size."""
    x, a = layer.inputs[0], layer.attrs
    rank = x.type.rank
    axes = tuple(normalize_axis(i, rank) for i in a.get("axes") or range(rank))
    scales, sizes = _find_scales(layer), None
    result = [(d, 1.0) for d in x.shape]
    if 0 in [x.shape[i] for i in axes]:
        raise NetworkError(f"Resize '{layer.name}': {x.type} has no elements")
    roi = layer.input(1)
    if roi is not None and roi.shape not in ((0,), (2 * len(axes),)):
        raise NetworkError(f"Resize '{layer.name}': its region is {roi.type}, it needs {2 * len(axes)} values")
    if scales is not None and layer.attrs.get("sizes") is not None:
        raise NetworkError(f"Resize '{layer.name}' has both scales and sizes; give one of them")
    if scales is None:
        sizes = find_given_dims(layer, "sizes", 3)
    if (scales is None) == (sizes is None) or len(scales or sizes) != len(axes):
        raise NetworkError(f"Resize '{layer.name}' needs scales or sizes with {len(axes)} values, one per axis")
    if sizes is not None and a["keep_aspect_ratio_policy"] != "stretch":
        return _keep_aspect_ratio(layer, axes, sizes, result)
    for i, axis in enumerate(axes):
        if scales is not None:
            if not scales[i] > 0:
                raise NetworkError(f"Resize '{layer.name}': a scale is {scales[i]}; scales must be positive")
            result[axis] = (_scale_size(x.shape[axis], scales[i]), scales[i])
        else:
            result[axis] = (sizes[i], None if sizes[i] != x.shape[axis] else 1.0)
    return result


def _find_scales(layer):
    if layer.attrs.get("scales") is not None:
        return tuple(layer.attrs["scales"])
    t = layer.input(2)
    if t is None or t.shape == (0,):
        return None
    if t.is_constant:
        return tuple(float(v) for v in t.array())
    scales = find_known_values(t)
    if scales is None or not all(isinstance(v, int) for v in scales):
        raise UnsupportedError(
            f"Resize '{layer.name}': its scales are computed at run time; they must be constant. Export with sizes or fixed scales"
        )
    return tuple(float(v) for v in scales)


def _scale_size(n, scale):
    """floor(n * scale); for a dynamic n the scale is converted to a fraction."""
    if isinstance(n, int):
        return int(np.floor(n * scale))
    f = Fraction(scale).limit_denominator(1000)
    return floordiv(n * f.numerator, f.denominator)


def _keep_aspect_ratio(layer, axes, sizes, scales):
    x = layer.inputs[0]
    if not all(isinstance(v, int) for v in (*sizes, *(x.shape[a] for a in axes))):
        raise UnsupportedError(f"Resize '{layer.name}' keeps the aspect ratio, which needs static sizes")
    policy = layer.attrs["keep_aspect_ratio_policy"]
    if policy not in ("not_larger", "not_smaller"):
        raise NetworkError(f"keep_aspect_ratio_policy is stretch, not_larger or not_smaller, not {policy!r}")
    pick = min if policy == "not_larger" else max
    scale = pick(s / x.shape[a] for s, a in zip(sizes, axes, strict=True))
    for a in axes:
        scales[a] = (int(np.floor(scale * x.shape[a] + 0.5)), scale)
    return scales


def infer(layer):
    require_numeric_input(layer)
    how = make_resampling(layer)
    for name, value, known in (("mode", how.mode, MODES), ("coordinate_transformation_mode", how.coordinates, COORDINATES)):
        if value not in known:
            raise NetworkError(f"{name} is one of {', '.join(known)}, not {value!r}")
    if how.mode == "nearest" and how.rounding not in ROUNDING:
        raise NetworkError(f"nearest_mode is one of {', '.join(ROUNDING)}, not {how.rounding!r}")
    if how.mode != "nearest":
        require_float_input(layer)
    shape = [d for d, _ in resize_targets(layer)]
    if 0 in shape:
        raise NetworkError(f"the output of {layer.inputs[0].type} is empty: {shape}")
    return layer.inputs[0].type.with_shape(shape)


def make_resampling(layer) -> Resampling:
    """The layer's attributes as a Resampling."""
    a = layer.attrs
    return Resampling(
        a["mode"],
        a["coordinate_transformation_mode"],
        a["nearest_mode"],
        a["cubic_coeff_a"],
        bool(a["exclude_outside"]),
        a["extrapolation_value"],
        bool(a["antialias"]),
    )


def resize_axes(layer, shape, roi=None, scales=None, sizes=None):
    """Yields (axis, outputs, scale, region) of each resampled axis; arguments are arrays, as for the reference."""
    how, rank = make_resampling(layer), len(shape)
    axes = [int(i) % rank for i in layer.attrs.get("axes") or range(rank)]
    scales = layer.attrs.get("scales", scales if scales is not None and scales.size else None)
    sizes = layer.attrs.get("sizes", sizes)
    sizes = None if sizes is None else to_ints(sizes)
    scales = None if scales is None else [float(s) for s in np.reshape(scales, -1)]
    if sizes is not None and layer.attrs["keep_aspect_ratio_policy"] != "stretch":
        pick = min if layer.attrs["keep_aspect_ratio_policy"] == "not_larger" else max
        scales = [pick(int(s) / shape[a] for s, a in zip(sizes, axes, strict=True))] * len(axes)
        sizes = [int(np.floor(scales[0] * shape[a] + 0.5)) for a in axes]
    result = []
    for i, axis in enumerate(axes):
        size = shape[axis]
        scale = float(scales[i]) if scales is not None else int(sizes[i]) / size
        out = int(sizes[i]) if sizes is not None else int(np.floor(size * scale))
        part = (float(roi[i]), float(roi[i + len(axes)])) if roi is not None and roi.size else (0.0, 1.0)
        if out != size or scale != 1 or how.coordinates == "tf_crop_and_resize":
            result.append((axis, out, scale, part))
    return result


def list_resampled_axes(layer):
    """(axis, outputs, scale, region) of each resampled axis of a layer with static shapes; its region is a constant."""
    shape, roi = layer.inputs[0].shape, layer.input(1)
    axes = [normalize_axis(i, len(shape)) for i in layer.attrs.get("axes") or range(len(shape))]
    part = dict.fromkeys(axes, (0.0, 1.0))
    if roi is not None and roi.shape != (0,):
        values = [float(v) for v in roi.array()]
        part = {axis: (values[i], values[i + len(axes)]) for i, axis in enumerate(axes)}
    crops = layer.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize"
    targets = [(out, out / n if scale is None else scale) for n, (out, scale) in zip(shape, resize_targets(layer), strict=True)]
    return [(axis, *targets[axis], part[axis]) for axis in axes if crops or targets[axis] != (shape[axis], 1)]


def compute_reference(layer, x, roi=None, scales=None, sizes=None):
    how, y, outside = make_resampling(layer), x, []
    for axis, out, scale, part in resize_axes(layer, x.shape, roi, scales, sizes):
        y, off = how.apply(y, axis, out, scale, part)
        outside += [] if off is None else [(axis, off)]
    for axis, off in outside:
        where = [slice(None)] * x.ndim
        where[axis] = off
        y = np.ascontiguousarray(y)
        y[tuple(where)] = how.extrapolation
    return y


def list_couples(layer):
    """Couples the axes that are not resampled (usually batch and channels)."""
    x, y = layer.inputs[0], layer.output
    if layer.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        return []
    return [Couple(x, i, y, i) for i, (d, scale) in enumerate(resize_targets(layer)) if d == x.shape[i] and scale == 1]


def recut(layer, kept_indices):
    sizes = None if _find_scales(layer) is not None else list(find_given_dims(layer, "sizes", 3))
    if sizes is None:
        return {}
    axes = [normalize_axis(i, layer.inputs[0].type.rank) for i in layer.attrs.get("axes") or range(layer.inputs[0].type.rank)]
    changed = False
    for (t, axis), at in kept_indices.items():
        if t is layer.output and axis in axes:
            sizes[axes.index(axis)], changed = len(at), True
    return replace_given(layer, "sizes", 3, sizes) if changed else {}


def read(node, g):
    """Resize-10 and Upsample take scales as input 1; Resize-11 empty tensors for absent inputs."""
    x, *rest = node.inputs
    if node.op == "Resize" and node.opset >= 11:
        inputs = [x, rest[0] if rest and node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize" else None, *rest[1:]]
        if len(inputs) > 3 and inputs[3] is not None:
            inputs[2] = None
        return node.add(g, "Resize", *inputs, **{k: v for k, v in node.attrs.items() if k != "axes" or v})
    mode = node.attrs.get("mode", "nearest")
    attrs = {"mode": "linear" if mode == "bilinear" else mode, "coordinate_transformation_mode": "asymmetric"}
    scales = require_known_scales(node, rest[0])
    if mode == "nearest" and min(scales) < 1:  # nearest rounds up when downsampling and down when upsampling
        down = g.constant(np.minimum(scales, 1), f"{node.name}.down")
        up = np.maximum(scales, 1)
        if up.max() == 1:
            return node.add(g, "Resize", x, None, down, nearest_mode="ceil", **attrs)
        x = g.add("Resize", x, None, down, nearest_mode="ceil", name=f"{node.name}_down", sources=(node.name,), **attrs)
        return node.add(g, "Resize", x, None, g.constant(up, f"{node.name}.up"), nearest_mode="floor", **attrs)
    return node.add(g, "Resize", x, None, rest[0], nearest_mode="floor", **attrs)


def require_known_scales(node, t):
    """Scales as float32. Raises UnsupportedError if they are not constant."""
    if t.is_constant:
        return np.asarray(t.array(), np.float32)
    scales = find_known_values(t)
    if scales is None or not all(isinstance(v, int) for v in scales):
        raise node.unsupported("its scales are computed at run time; they must be constant. Export with fixed scales")
    return np.array(scales, np.float32)


def to_onnx(layer, w):
    """In ONNX scales are float32 and precede sizes."""
    for key, default in (("antialias", 0), ("axes", None), ("keep_aspect_ratio_policy", "stretch")):
        if layer.attrs.get(key, default) != default:
            needs_opset(layer, w, 18, key)
    if layer.attrs["coordinate_transformation_mode"] == "half_pixel_symmetric":
        needs_opset(layer, w, 19, "half_pixel_symmetric")
    scales = layer.attrs.get("scales")
    if scales is None:
        make_attribute_exporter("sizes", first=3)(layer, w)
        return
    defaults = get_op("Resize").attrs
    attrs = {k: v for k, v in layer.attrs.items() if k != "scales" and v != defaults[k]}
    inputs = [w.name(layer.inputs[0]), "", w.constant(np.array(scales, np.float32), f"{layer.name}.scales")]
    w.node("Resize", inputs, [w.name(layer.output)], name=layer.name, **attrs)


UP = np.array([1, 1, 2, 2], np.float32)

op(
    "Resize",
    infer,
    compute_reference,
    attrs={
        "mode": "nearest",
        "coordinate_transformation_mode": "half_pixel",
        "nearest_mode": "round_prefer_floor",
        "cubic_coeff_a": -0.75,
        "exclude_outside": 0,
        "extrapolation_value": 0.0,
        "antialias": 0,
        "axes": INTS,
        "keep_aspect_ratio_policy": "stretch",
        "scales": FLOATS,
        "sizes": INTS,
    },
    couples=list_couples,
    recut=recut,
    onnx=read,
    onnx_ops=("Resize", "Upsample"),
    to_onnx=to_onnx,
    samples=[
        (["f32[1,3,4,5]", None, UP], {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
        (["f32[1,3,4,5]", None, None, np.array([1, 3, 9, 7])], {"mode": "linear"}),
        (["f32[2,17,5,5]", None, None, np.array([2, 17, 13, 9])], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
        (
            ["f32[1,3,9,8]", None, np.array([1, 1, 0.6, 0.5], np.float32)],
            {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
        ),
        (["f32[1,2,5,6]", None, UP], {"mode": "cubic"}),
        (["f32[1,2,5,6]", None, None, np.array([1, 2, 8, 9])], {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}),
        (["f32[1,2,5,6]", None, None, np.array([8, 9])], {"mode": "nearest", "axes": (2, 3), "nearest_mode": "round_prefer_ceil"}),
        (["f32[1,2,8,6]", None, None, np.array([5, 4])], {"mode": "linear", "axes": (2, 3), "keep_aspect_ratio_policy": "not_larger"}),
        (["f32[1,2,8,9]", None, np.array([1, 1, 0.5, 0.4], np.float32)], {"mode": "linear", "antialias": 1}),
        (["f32[1,2,9,9]", None, np.array([1, 1, 0.4, 0.5], np.float32)], {"mode": "cubic", "antialias": 1}),
        (
            ["f32[1,1,4,4]", np.array([0, 0, 0.4, 0.6, 1, 1, 1.2, 1.7], np.float32), None, np.array([1, 1, 3, 3])],
            {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0},
        ),
        (
            ["f32[1,3,4]", None, np.array([1, 1, 2.5], np.float32)],
            {"coordinate_transformation_mode": "half_pixel_symmetric", "nearest_mode": "ceil"},
        ),
        (["extreme f32[1,4,4,4]"], {"scales": (1.0, 1.0, 2.0, 2.0)}),
        (["f32[1,4,4,4]"], {"sizes": (1, 4, 2, 2), "mode": "linear"}),
        (["u8[1,1,4,4]", None, UP], {}),
        (["f32[1,2,8,6]", None, np.array([1, 1, 0.5, 0.5], np.float32)], {}),
    ],
)
