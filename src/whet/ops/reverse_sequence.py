"""ReverseSequence: the first `lengths[b]` entries of each sequence in reverse order."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._types import may_equal, normalize_axis


def infer(layer):
    x, lengths = layer.inputs
    time, batch = normalize_axis(layer.attrs["time_axis"], x.type.rank), normalize_axis(layer.attrs["batch_axis"], x.type.rank)
    if time == batch or lengths.dtype.kind != "int" or not may_equal(lengths.shape, (x.shape[batch],)):
        raise NetworkError(f"needs two axes and one length per sequence of {x.type}, not {lengths.type}")
    return x.type


def compute_reference(layer, x, lengths):
    time, batch = layer.attrs["time_axis"] % x.ndim, layer.attrs["batch_axis"] % x.ndim
    steps = np.arange(x.shape[time])
    order = np.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)  # [batch, time]
    shape = [1] * x.ndim
    shape[batch], shape[time] = order.shape
    return np.take_along_axis(x, (order if batch < time else order.T).reshape(shape), time)


op(
    "ReverseSequence",
    infer,
    compute_reference,
    attrs={"batch_axis": 1, "time_axis": 0},
    samples=[
        (["f32[5,3,2]", np.array([5, 1, 3])], {}),
        (["f32[3,5]", np.array([2, 5, 4])], {"batch_axis": 0, "time_axis": 1}),
    ],
)
