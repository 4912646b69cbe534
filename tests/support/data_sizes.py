"""Shapes with sizes that depend on the data: the arrays determine them."""

from whet.ops import is_data_sized


def with_sizes(layer, arrays):
    """The shapes of the layer's outputs; symbols of an op with data-dependent sizes are replaced by the arrays' sizes, the same for each symbol."""
    values = {}
    shapes = [list(t.shape) for t in layer.outputs]
    if is_data_sized(layer):
        for shape, a in zip(shapes, arrays, strict=True):
            assert len(shape) == a.ndim
            for k, d in enumerate(shape):
                if str(d).startswith("size_of_"):
                    shape[k] = values.setdefault(str(d), a.shape[k])
    return [tuple(s) for s in shapes]
