"""DepthToSpace: blocks of channels become blocks of pixels; `mode` DCR (depth, column, row) or CRD gives the channel order."""

from whet.errors import NetworkError
from whet.ops._base import NEEDS_INT, Couple, op


def infer(layer):
    x, b = layer.inputs[0], layer.attrs["blocksize"]
    if x.type.rank != 4 or b < 1 or (isinstance(x.shape[1], int) and x.shape[1] % (b * b)):
        raise NetworkError(f"takes [N, C, H, W] with C a multiple of {b * b}, not {x.type}")
    if layer.attrs["mode"] not in ("DCR", "CRD"):
        raise NetworkError(f"mode is DCR or CRD, not {layer.attrs['mode']!r}")
    n, c, h, w = x.shape
    return x.type.with_shape((n, c // (b * b), h * b, w * b))


def compute_reference(layer, x):
    b, (n, c, h, w) = layer.attrs["blocksize"], x.shape
    if layer.attrs["mode"] == "DCR":
        y = x.reshape(n, b, b, c // (b * b), h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        y = x.reshape(n, c // (b * b), b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


def list_couples(layer):
    """An output channel consists of several input channels: adjacent ones (CRD), or one of each block (DCR)."""
    x, y, places = layer.inputs[0], layer.output, layer.attrs["blocksize"] ** 2
    return [Couple(x, 0, y, 0), Couple(y, 1, x, 1, **{"b_repeat" if layer.attrs["mode"] == "DCR" else "b_block": places})]


op(
    "DepthToSpace",
    infer,
    compute_reference,
    attrs={"blocksize": NEEDS_INT, "mode": "DCR"},
    couples=list_couples,
    zeros=(),
    samples=[
        (["f32[2,12,3,4]"], {"blocksize": 2}),
        (["f32[2,12,3,4]"], {"blocksize": 2, "mode": "CRD"}),
        (["extreme f32[1,9,2,2]"], {"blocksize": 3}),
    ],
)
