"""MelWeightMatrix: the matrix [spectrogram bins, mel bins] that maps a spectrum to the mel scale, from five known scalars."""

import numpy as np

from whet.errors import NetworkError
from whet.network import F32, TensorType
from whet.ops._base import op, require_known_ints


def infer(layer):
    if len(layer.inputs) != 5:
        raise NetworkError(f"takes five scalars, not {len(layer.inputs)}")
    for i, what in enumerate(("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")):
        t = layer.needs(i)
        if t.type.rank > 1 or t.type.elements != 1 or t.dtype.kind != ("int" if i < 3 else "float"):
            raise NetworkError(f"{what} is one {'integer' if i < 3 else 'floating-point number'}, not {t.type}")
    mel, length = (require_known_ints(layer, i, what)[0] for i, what in enumerate(("num_mel_bins", "dft_length")))
    if any(isinstance(n, int) and n <= 0 for n in (mel, length)):
        raise NetworkError(f"{mel} mel bins of a transform of {length} values: both must be positive")
    return TensorType(layer.attrs["output_datatype"], (length // 2 + 1, mel))


def compute_reference(layer, mel_bins, length, rate, low, high):
    mel_bins, length, rate = (int(np.reshape(v, ())) for v in (mel_bins, length, rate))
    low_mel, high_mel = (2595 * np.log10(1 + float(np.reshape(v, ())) / 700) for v in (low, high))
    mels = np.arange(mel_bins + 2) * ((high_mel - low_mel) / (mel_bins + 2)) + low_mel
    edges = ((length + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(np.int64)
    if edges.min() < 0 or edges.max() > length // 2:
        raise IndexError(f"the bins of the edges {edges.min()} and {edges.max()} are outside the {length // 2 + 1} of the spectrum")
    y = np.zeros((length // 2 + 1, mel_bins))
    for i in range(mel_bins):
        left, centre, right = edges[i : i + 3]
        if left == centre:
            y[centre, i] = 1
        else:
            y[left : centre + 1, i] = (np.arange(left, centre + 1) - left) / (centre - left)
        if right > centre:
            y[centre:right, i] = (right - np.arange(centre, right)) / (right - centre)
    return y.astype(layer.attrs["output_datatype"].numpy)


def read(node, g):
    return node.add(g, "MelWeightMatrix", *node.inputs, output_datatype=node.dtype(node.attrs.get("output_datatype", 1)))


op(
    "MelWeightMatrix",
    infer,
    compute_reference,
    attrs={"output_datatype": F32},
    onnx=read,
    samples=[([np.array(8), np.array(64), np.array(8192), np.array(0, np.float32), np.array(4096, np.float32)], {})],
)
