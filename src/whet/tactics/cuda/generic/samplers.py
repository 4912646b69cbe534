"""Ops that sample images at positions that are computed at run time: grids, boxes, shifted taps.

A thread per value of the result. Positions outside of an image read nothing; of a box only the points within the image are visited, however
large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index


def _emit_grid_sample(layer: Layer) -> str:
    x, grid, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    (image, channel, *places), spatial, a = emit_coordinates(y), x[2:], layer.attrs
    r, aligned, padding, mode = len(spatial), bool(a["align_corners"]), a["padding_mode"], a["mode"]
    at = emit_flat_index([image, *places, "0"], grid)
    text = f"const long long base = ({image} * {x[1]} + {channel}) * {prod(spatial)}, at = {at}; Number sum = 0;"
    taps: list[list[tuple[str, str]]] = []
    for d, n in enumerate(spatial):
        text += f"Number g{d} = in1(at + {r - 1 - d}); "
        text += f"g{d} = (g{d} + 1) / 2 * {n - 1};" if aligned else f"g{d} = ((g{d} + 1) * {n} - 1) / 2;"
        if padding != "zeros" and mode != "cubic":
            text += _emit_axis_mapping(f"g{d}", n, padding, aligned)
        text += f"const Number f{d} = {'rint' if mode == 'nearest' else 'floor'}(g{d}), t{d} = g{d} - f{d};"
        if mode == "nearest":
            taps.append([(f"f{d}", "(Number)1")])
        elif mode == "linear":
            taps.append([(f"f{d}", f"(1 - t{d})"), (f"(f{d} + 1)", f"t{d}")])
        else:
            far, near = "((c * ({0}) - 5 * c) * ({0}) + 8 * c) * ({0}) - 4 * c", "((c + 2) * ({0}) - (c + 3)) * ({0}) * ({0}) + 1"
            steps = ((-1, far, "t{} + 1"), (0, near, "t{}"), (1, near, "1 - t{}"), (2, far, "2 - t{}"))
            taps.append([(f"(f{d} + {k})", f"({form.format(arg.format(d))})") for k, form, arg in steps])
    for chosen in product(*taps):
        own = ""
        for d, (place, _) in enumerate(chosen):
            own += f"Number q{d} = {place}; {'' if padding == 'zeros' else _emit_axis_mapping(f'q{d}', spatial[d], padding, aligned)} "
        inside = " && ".join(f"q{d} >= 0 && q{d} < {n}" for d, n in enumerate(spatial))
        index = emit_flat_index([f"q{d}" for d in range(r)], spatial)
        text += f"{{ {own} if ({inside}) sum += in0(base + {index}) * {' * '.join(w for _, w in chosen)}; }}"
    return f"{'const Number c = -0.75;' if mode == 'cubic' else ''} {text} put0(i, sum);"


def _emit_axis_mapping(v: str, n: int, padding: str, aligned: bool) -> str:
    """Statements that map the coordinate `v` into an axis of `n` entries by border or reflection padding."""
    border = f"{v} = {v} < 0 ? 0 : {v} > {n - 1} ? {n - 1} : {v};"
    if padding == "border":
        return border
    low, span = (0.0, n - 1.0) if aligned else (-0.5, float(n))
    if span == 0:
        return f"{v} = 0;"
    start, once, twice = (f"(Number){x}" for x in (low, span, 2 * span))
    return f"{v} = fmod(fabs({v} - {start}), {twice}); if ({v} > {once}) {v} = {twice} - {v}; {v} += {start}; {border}"


def _emit_roi_align(layer: Layer) -> str:
    x, y, a = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape), layer.attrs
    box, channel, row, column = emit_coordinates(y)
    half, average = a["coordinate_transformation_mode"] == "half_pixel", a["mode"] == "avg"
    text = f"long long image = at2({box}); image = image < 0 ? 0 : image >= {x[0]} ? {x[0] - 1} : image;"
    text += f"const long long base = (image * {x[1]} + {channel}) * {x[2] * x[3]};"
    for d, (bins, place, size) in enumerate(((y[2], row, x[2]), (y[3], column, x[3]))):
        ends = [f"in1({box} * 4 + {k}) * (Number){a['spatial_scale']!r} - (Number){0.5 if half else 0.0}" for k in (1 - d, 3 - d)]
        text += f"""
            const Number s{d} = {ends[0]}, l{d} = {f"({ends[1]}) - s{d}" if half else f"at_least_1(({ends[1]}) - s{d})"}, bin{d} = l{d} / {bins};
            const Number n{d} = {a["sampling_ratio"] or f"l{d} > 0 ? ceil(bin{d}) : (Number)0"};
            const Number first{d} = s{d} + (Number){place} * bin{d}, step{d} = bin{d} / (n{d} > 0 ? n{d} : 1);
            Number from{d} = 0, to{d} = n{d} - 1;
            if (step{d} > 0) {{
                const Number low = floor((-1 - first{d}) / step{d}) - 1, high = ceil(({size} - first{d}) / step{d}) + 1;
                from{d} = low > 0 ? low : 0; to{d} = high < to{d} ? high : to{d};
            }}
        """
    inner = ""
    for d, size in enumerate(x[2:]):
        inner += f"""
            const Number v{d} = first{d} + (k{d} + (Number)0.5) * step{d}; if (!(v{d} >= -1 && v{d} <= {size})) continue;
            const Number c{d} = v{d} > 0 ? v{d} : 0; const long long lo{d} = c{d} < {size - 1} ? (long long)c{d} : {size - 1};
            const long long hi{d} = lo{d} + 1 < {size} ? lo{d} + 1 : {size - 1}; const Number w{d} = lo{d} >= {size - 1} ? 0 : c{d} - lo{d};
        """
        inner += f"for (Number k{d + 1} = from{d + 1}; k{d + 1} <= to{d + 1}; ++k{d + 1}) {{" if d == 0 else ""
    rows, columns = ((("lo0", "1 - w0"), ("hi0", "w0")), (("lo1", "1 - w1"), ("hi1", "w1")))
    corners = [f"in0(base + {r} * {x[3]} + {c}) * ({wr}) * ({wc})" for r, wr in rows for c, wc in columns]
    if average:
        inner += f"sum += {' + '.join(corners)};"
    else:  # the maximum over the weighted corners, as ONNX defines it
        inner += " ".join(f"{{ const Number v = {c}; if (seen == 0 || v > sum || v != v) sum = v; seen += 1; }}" for c in corners)
    result = "n0 * n1 > 0 ? sum / (n0 * n1) : 0" if average else "seen > 0 && seen < 4 * n0 * n1 && sum < 0 ? 0 : sum"
    return f"""
        auto at_least_1 = [](Number v) {{ return v > 1 ? v : (Number)1; }};
        {text} Number sum = 0, seen = 0; for (Number k0 = from0; k0 <= to0; ++k0) {{ {inner} }} }} put0(i, {result});
    """


def _emit_max_roi_pool(layer: Layer) -> str:
    x, y = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    box, channel, *bins = emit_coordinates(y)
    text = f"Number number = in1({box} * 5); if (!(number > 0)) number = 0; if (number > {x[0] - 1}) number = {x[0] - 1};"
    text += f"const long long base = ((long long)number * {x[1]} + {channel}) * {x[2] * x[3]};"
    for d in (0, 1):
        for end, k in (("a", 2 - d), ("b", 4 - d)):
            scaled = f"in1({box} * 5 + {k}) * (Number){layer.attrs['spatial_scale']!r}"
            text += f"const long long {end}{d} = corner({scaled});"
        text += f"""
            const long long l{d} = b{d} - a{d} + 1 > 1 ? b{d} - a{d} + 1 : 1, p{d} = {bins[d]} * l{d};
            const long long from{d} = clip(p{d} / {y[2 + d]} + a{d}, {x[2 + d]});
            const long long to{d} = clip((p{d} + l{d} + {y[2 + d] - 1}) / {y[2 + d]} + a{d}, {x[2 + d]});
        """
    return f"""
        auto corner = [](Number v) -> long long {{
            if (v != v) return 0;
            const Number whole = floor(fabs(v) + (Number)0.5), most = 1073741824; const long long r = (long long)(whole < most ? whole : most);
            return v < 0 ? -r : r;
        }};
        auto clip = [](long long v, long long n) {{ return v < 0 ? 0ll : v > n ? n : v; }};
        {text} Number best = 0; bool any = false;
        for (long long r = from0; r < to0; ++r) for (long long c = from1; c < to1; ++c) {{
            const Number v = in0(base + r * {x[3]} + c); if (!any || v > best || v != v) best = v; any = true;
        }}
        put0(i, best);
    """


def _emit_deform_conv(layer: Layer) -> str:
    x, w, y = (static_shape(t.shape) for t in (layer.needs(0), layer.needs(1), layer.outputs[0]))
    a = layer.attrs
    strides, dilations, pads = (tuple(a.get(name) or default) for name, default in (("strides", (1, 1)), ("dilations", (1, 1)), ("pads", (0,) * 4)))
    (image, k, row, column), (kh, kw), plane, out = emit_coordinates(y), w[2:], x[2] * x[3], y[2] * y[3]
    taps, each, shared = kh * kw, x[1] // a["group"], x[1] // a["offset_group"]
    corners = ""
    for dy, dx in product((0, 1), (0, 1)):
        place = f"(long long)(v0 + {dy}) * {x[3]} + (long long)(u0 + {dx})"
        wy, wx = (f"{t} - {t}0" if side else f"1 - ({t} - {t}0)" for t, side in (("v", dy), ("u", dx)))
        inside = f"v0 + {dy} >= 0 && v0 + {dy} < {x[2]} && u0 + {dx} >= 0 && u0 + {dx} < {x[3]}"
        corners += f"if ({inside}) tap += in0(from + {place}) * ({wy}) * ({wx}); "
    mask = f"tap *= in4((({image} * {a['offset_group']} + g) * {taps} + t) * {out} + pixel);" if layer.input(4) is not None else ""
    return f"""
        const long long pixel = {row} * {y[3]} + {column}; Number sum = {f"in3({k})" if layer.input(3) is not None else "0"};
        for (int c = 0; c < {each}; ++c) {{
            const long long channel = {k} / {w[0] // a["group"]} * {each} + c, g = channel / {shared}, from = ({image} * {x[1]} + channel) * {plane};
            for (int t = 0; t < {taps}; ++t) {{
                const long long shift = (({image} * {a["offset_group"]} + g) * {taps} + t) * {2 * out} + pixel;
                const Number v = (Number)({row} * {strides[0]} - {pads[0]} + t / {kw} * {dilations[0]}) + in2(shift);
                const Number u = (Number)({column} * {strides[1]} - {pads[1]} + t % {kw} * {dilations[1]}) + in2(shift + {out});
                const Number v0 = floor(v), u0 = floor(u); Number tap = 0;
                {corners} {mask}
                sum += tap * in1(({k} * {each} + c) * {taps} + t);
            }}
        }}
        put0(i, sum);
    """


_BODIES: dict[str, Callable[[Layer], str]] = {
    "DeformConv": _emit_deform_conv, "GridSample": _emit_grid_sample, "MaxRoiPool": _emit_max_roi_pool, "RoiAlign": _emit_roi_align,
}  # fmt: skip


@tactic
class Samplers(PerValueTactic):
    """Row-major; positions in 16 bits would be too coarse, so that values keep their type."""

    ops = tuple(_BODIES)

    def allows_16_bits(self, layer: Layer) -> bool:
        return False

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        return [(_BODIES[layer.op](layer), prod(static_shape(layer.outputs[0].shape)))]
