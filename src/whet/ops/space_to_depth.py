"""SpaceToDepth: blocks of pixels become channels; in `mode` DCR the position in the block is the outer index, in CRD the input channel."""

from whet.errors import NetworkError
from whet.ops._base import NEEDS_INT, Couple, op


def infer(layer):
    x, b = layer.inputs[0], layer.attrs["blocksize"]
    if x.type.rank != 4 or b < 1 or any(isinstance(d, int) and d % b for d in x.shape[2:]):
        raise NetworkError(f"takes [N, C, H, W] with H and W multiples of {b}, not {x.type}")
    if layer.attrs["mode"] not in ("DCR", "CRD"):
        raise NetworkError(f"mode is DCR or CRD, not {layer.attrs['mode']!r}")
    n, c, h, w = x.shape
    return x.type.with_shape((n, c * b * b, h // b, w // b))


def compute_reference(layer, x):
    b, (n, c, h, w) = layer.attrs["blocksize"], x.shape
    order = (0, 3, 5, 1, 2, 4) if layer.attrs["mode"] == "DCR" else (0, 1, 3, 5, 2, 4)
    return x.reshape(n, c, h // b, b, w // b, b).transpose(order).reshape(n, c * b * b, h // b, w // b)


def list_couples(layer):
    """An input channel becomes several: adjacent ones (CRD), or one in each block (DCR)."""
    x, y, places = layer.inputs[0], layer.output, layer.attrs["blocksize"] ** 2
    return [Couple(x, 0, y, 0), Couple(x, 1, y, 1, **{"b_repeat" if layer.attrs["mode"] == "DCR" else "b_block": places})]


op(
    "SpaceToDepth",
    infer,
    compute_reference,
    attrs={"blocksize": NEEDS_INT, "mode": "DCR"},
    couples=list_couples,
    zeros=(),
    samples=[
        (["f32[2,3,4,6]"], {"blocksize": 2}),
        (["f32[2,3,4,6]"], {"blocksize": 2, "mode": "CRD"}),
        (["extreme f32[1,5,6,3]"], {"blocksize": 3}),
    ],
)
