"""SpaceToDepth: blocks of pixels become channels, the block's places first."""

from whet.errors import NetworkError
from whet.ops._base import NEEDS_INT, Couple, op


def infer(layer):
    x, b = layer.inputs[0], layer.attrs["blocksize"]
    if x.type.rank != 4 or b < 1 or any(isinstance(d, int) and d % b for d in x.shape[2:]):
        raise NetworkError(f"takes [N, C, H, W] with H and W multiples of {b}, not {x.type}")
    n, c, h, w = x.shape
    return x.type.with_shape((n, c * b * b, h // b, w // b))


def reference(layer, x):
    b, (n, c, h, w) = layer.attrs["blocksize"], x.shape
    return x.reshape(n, c, h // b, b, w // b, b).transpose(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


op(
    "SpaceToDepth",
    infer,
    reference,
    attrs={"blocksize": NEEDS_INT},
    couples=lambda layer: [Couple(layer.inputs[0], 0, layer.output, 0)],
    samples=[(["f32[2,3,4,6]"], {"blocksize": 2}), (["extreme f32[1,5,6,3]"], {"blocksize": 3})],
)
