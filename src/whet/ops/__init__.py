"""What ops mean: attributes, output types, NumPy reference, samples, which axes are cut together. One file each."""

from whet.ops._base import OPS, REQUIRED, Couple, Op, Sample, get_op, given, given_ints, infer_layer, known_ints, known_values, op
from whet.ops._interpret import bind_layer, bind_symbols, run_layer, run_network, run_regions, widened
from whet.ops._samples import sample_arrays, sample_layer
from whet.ops._types import axis_of, broadcast, same_as_input, same_axes
from whet.registry import load_folder

__all__ = [
    "OPS",
    "REQUIRED",
    "Couple",
    "Op",
    "Sample",
    "axis_of",
    "bind_layer",
    "bind_symbols",
    "broadcast",
    "get_op",
    "given",
    "given_ints",
    "infer_layer",
    "known_ints",
    "known_values",
    "op",
    "run_layer",
    "run_network",
    "run_regions",
    "same_as_input",
    "same_axes",
    "sample_arrays",
    "sample_layer",
    "widened",
]

load_folder(__name__, __path__)
