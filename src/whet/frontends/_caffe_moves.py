"""Converters of Caffe's layers that move, select and reduce values, and of SSD's prior boxes."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import numpy as np

from whet.frontends._caffe_layer import Layer, caffe_layer
from whet.network import F32, Tensor


@caffe_layer("Concat")
def convert_concat(layer: Layer) -> Tensor:
    p = layer.param.concat_param
    return layer.add("Concat", *layer.bottoms, axis=layer.axis(p.concat_dim if p.HasField("concat_dim") else p.axis))


@caffe_layer("Slice")
def convert_slice(layer: Layer) -> list[Tensor]:
    p, tops = layer.param.slice_param, len(layer.source.tops)
    axis = layer.axis(p.slice_dim if p.HasField("slice_dim") else p.axis)
    (size,) = layer.require_static(layer.x.shape[axis : axis + 1], "the sliced axis")
    points = list(p.slice_point) or [size * i // tops for i in range(1, tops)]
    parts = [b - a for a, b in pairwise([0, *points, size])]
    if len(parts) != tops or min(parts) < 1 or (not p.slice_point and size % tops):
        raise layer.unsupported(f"{size} elements cannot be sliced at {points} into {tops} tops")
    made = layer.add("Split", layer.x, layer.ints(*parts), axis=axis)
    return list(made) if isinstance(made, tuple) else [made]


@caffe_layer("Split")
def convert_split(layer: Layer) -> list[Tensor]:
    return [layer.x] * len(layer.source.tops)


@caffe_layer("Dropout")
def convert_dropout(layer: Layer) -> Tensor:
    return layer.x


@caffe_layer("Flatten")
def convert_flatten(layer: Layer) -> Tensor:
    p, shape = layer.param.flatten_param, layer.x.shape
    first, last = layer.axis(p.axis), layer.axis(p.end_axis)
    if first == 1 and last == layer.x.type.rank - 1:
        return layer.x if last == 1 else layer.add("Flatten", layer.x, axis=1)
    middle = 1
    for d in shape[first : last + 1]:
        middle = middle * d
    return layer.reshape(layer.x, (*shape[:first], middle, *shape[last + 1 :]))


@caffe_layer("Reshape")
def convert_reshape(layer: Layer) -> Tensor:
    """Replaces `num_axes` axes from `axis` on: 0 copies the bottom's size, one -1 is inferred."""
    p, shape = layer.param.reshape_param, layer.x.shape
    first = p.axis if p.axis >= 0 else layer.x.type.rank + p.axis + 1
    last = layer.x.type.rank if p.num_axes == -1 else first + p.num_axes
    if not 0 <= first <= last <= layer.x.type.rank:
        raise layer.unsupported(f"it replaces the axes {first} to {last} of a tensor of rank {layer.x.type.rank}")
    if any(d == 0 and first + i >= layer.x.type.rank for i, d in enumerate(p.shape.dim)):
        raise layer.unsupported("it copies (0) the size of an axis that the bottom does not have")
    target = [*shape[:first], *(shape[first + i] if d == 0 else d for i, d in enumerate(p.shape.dim)), *shape[last:]]
    if target.count(-1) > 1:
        raise layer.unsupported("it has more than one -1")
    return layer.reshape(layer.x, target)


@caffe_layer("Permute")
def convert_permute(layer: Layer) -> Tensor:
    order = list(layer.param.permute_param.order)
    return layer.add("Transpose", layer.x, perm=(*order, *(i for i in range(layer.x.type.rank) if i not in order)))


@caffe_layer("ShuffleChannel")
def convert_shuffle_channel(layer: Layer) -> Tensor:
    group, (n, c, *rest) = layer.param.shuffle_channel_param.group, layer.x.shape
    (channels,) = layer.require_static([c], "the number of channels")
    if not group or channels % group:
        raise layer.unsupported(f"{channels} channels cannot be split into {group} groups")
    y = layer.reshape(layer.x, (n, group, channels // group, *rest))
    y = layer.add("Transpose", y, perm=(0, 2, 1, *range(3, 3 + len(rest))))
    return layer.reshape(y, (n, c, *rest))


@caffe_layer("Tile")
def convert_tile(layer: Layer) -> Tensor:
    p = layer.param.tile_param
    repeats = [1] * layer.x.type.rank
    repeats[layer.axis(p.axis)] = p.tiles
    return layer.add("Tile", layer.x, layer.ints(*repeats))


@caffe_layer("Crop")
def convert_crop(layer: Layer) -> Tensor:
    p, x = layer.param.crop_param, layer.x
    if len(layer.bottoms) != 2:
        raise layer.unsupported("it needs two bottoms: what is cropped, and the size")
    axes = range(layer.axis(p.axis), x.type.rank)
    if len(p.offset) not in (0, 1, len(axes)):
        raise layer.unsupported(f"it has {len(p.offset)} offsets for {len(axes)} cropped axes")
    offsets = list(p.offset) if len(p.offset) == len(axes) else [p.offset[0] if p.offset else 0] * len(axes)
    ends = tuple(o + layer.bottoms[1].shape[a] for o, a in zip(offsets, axes, strict=True))
    if all(isinstance(n, int) for n in ends):
        return layer.add("Slice", x, layer.ints(*offsets), layer.ints(*ends), layer.ints(*axes))
    return layer.add("Slice", x, starts=tuple(offsets), ends=ends, axes=tuple(axes))


@caffe_layer("Interp")
def convert_interp(layer: Layer) -> Tensor:
    """Bilinear resizing with aligned corners, of DeepLab and PSPNet."""
    p = layer.param.interp_param
    if p.pad_beg or p.pad_end:
        raise layer.unsupported("pad_beg and pad_end are not supported; add a Crop layer")
    h, w = layer.require_static(layer.x.shape[2:], "height and width")
    if p.height and p.width:
        sizes = [p.height, p.width]
    else:
        sizes = [(n - 1) // p.shrink_factor + 1 for n in (h, w)]
        sizes = [n + (n - 1) * (p.zoom_factor - 1) for n in sizes]
    sizes = [*layer.require_static(layer.x.shape[:2], "batch and channels"), *sizes]
    return layer.add("Resize", layer.x, None, None, layer.ints(*sizes), mode="linear", coordinate_transformation_mode="align_corners")


@caffe_layer("Reduction")
def convert_reduction(layer: Layer) -> Tensor:
    p, x = layer.param.reduction_param, layer.x
    operation = p.DESCRIPTOR.fields_by_name["operation"].enum_type.values_by_number[p.operation].name
    op = {"SUM": "ReduceSum", "ASUM": "ReduceL1", "SUMSQ": "ReduceSumSquare", "MEAN": "ReduceMean"}[operation]
    y = layer.add(op, x, layer.ints(*range(layer.axis(p.axis), x.type.rank)), keepdims=0)
    return y if p.coeff == 1 else layer.add("Mul", y, layer.scalar(p.coeff))


@caffe_layer("ArgMax")
def convert_arg_max(layer: Layer) -> Tensor:
    """Without an axis: [N, 1, top_k] indices over all values of a sample, or [N, 2, top_k] indices and values."""
    p, x = layer.param.argmax_param, layer.x
    if p.HasField("axis"):
        axis = layer.axis(p.axis)
        values, indices = layer.add("TopK", x, layer.ints(p.top_k), axis=axis)
        return values if p.out_max_val else layer.add("Cast", indices, to=F32)
    flat = layer.add("Flatten", x, axis=1)
    values, indices = layer.add("TopK", flat, layer.ints(p.top_k), axis=1)
    found = layer.add("Unsqueeze", layer.add("Cast", indices, to=F32), layer.ints(1))
    return layer.add("Concat", found, layer.add("Unsqueeze", values, layer.ints(1)), axis=1) if p.out_max_val else found


@caffe_layer("PriorBox")
def convert_prior_box(layer: Layer) -> Tensor:
    """SSD's default boxes, a constant of shape [1, 2, boxes * 4]: corners relative to the image, then variances."""
    p = layer.param.prior_box_param
    if len(layer.bottoms) != 2:
        raise layer.unsupported("it needs two bottoms: a feature map and the image")
    h, w = layer.require_static(layer.x.shape[2:], "the feature map's height and width")
    image_h, image_w = layer.require_static(layer.bottoms[1].shape[2:], "the image's height and width")
    image_h, image_w = (p.img_h or p.img_size or image_h), (p.img_w or p.img_size or image_w)
    step_h, step_w = (p.step_h or p.step or image_h / h), (p.step_w or p.step or image_w / w)
    ratios = [1.0]
    for r in p.aspect_ratio:
        for ratio in (r, 1 / r) if p.flip else (r,):
            if all(abs(ratio - known) >= 1e-6 for known in ratios):
                ratios.append(ratio)
    sizes: list[tuple[float, float]] = []  # width, height
    for i, small in enumerate(p.min_size):
        sizes.append((small, small))
        if p.max_size:
            sizes.append((sqrt(small * p.max_size[i]),) * 2)
        sizes += [(small * sqrt(r), small / sqrt(r)) for r in ratios[1:]]
    if not sizes or len(p.max_size) not in (0, len(p.min_size)):
        raise layer.unsupported("it needs min_size, and as many max_size or none")
    y, x = np.meshgrid((np.arange(h) + p.offset) * step_h, (np.arange(w) + p.offset) * step_w, indexing="ij")
    half = np.array(sizes) / 2
    centre_x, centre_y = x[..., None], y[..., None]
    corners = [
        (centre_x - half[:, 0]) / image_w, (centre_y - half[:, 1]) / image_h,
        (centre_x + half[:, 0]) / image_w, (centre_y + half[:, 1]) / image_h,
    ]  # fmt: skip
    boxes = np.stack(corners, -1).reshape(-1, 4)
    if p.clip:
        boxes = boxes.clip(0, 1)
    variance = list(p.variance) or [0.1]
    variances = np.broadcast_to(np.array(variance if len(variance) == 4 else variance[:1] * 4), boxes.shape)
    return layer.weight(np.stack([boxes.reshape(-1), variances.reshape(-1)])[None], "boxes")
