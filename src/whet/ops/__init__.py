"""Op definitions: attributes, output types, NumPy reference, samples, coupled axes. One file each, which is imported when the op is looked up."""

from whet.ops._base import (
    OPS,
    OPTIONAL,
    REQUIRED,
    Couple,
    Op,
    Sample,
    get_op,
    given_dims,
    given_ints,
    has_symbols,
    infer_layer,
    is_data_sized,
    known_ints,
    known_values,
    op,
)
from whet.ops._folding import FoldBudget
from whet.ops._images import Axes, BatchAxis, NotPerImage, follow, fused_layers, fused_results
from whet.ops._interpret import bind_layer, bind_symbols, run_layer, run_network, run_regions, widen_attributes
from whet.ops._origin import evaluate_origin
from whet.ops._samples import sample_arrays, sample_layer
from whet.ops._sequences import NoValue, ReadValue, TensorSequence
from whet.ops._touching import batch_symbol, why_samples_touch
from whet.ops._types import axis_of, broadcast, same_as_input, same_axes

__all__ = [
    "OPS",
    "OPTIONAL",
    "REQUIRED",
    "Axes",
    "BatchAxis",
    "Couple",
    "FoldBudget",
    "NoValue",
    "NotPerImage",
    "Op",
    "ReadValue",
    "Sample",
    "TensorSequence",
    "axis_of",
    "batch_symbol",
    "bind_layer",
    "bind_symbols",
    "broadcast",
    "evaluate_origin",
    "follow",
    "fused_layers",
    "fused_results",
    "get_op",
    "given_dims",
    "given_ints",
    "has_symbols",
    "infer_layer",
    "is_data_sized",
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
    "why_samples_touch",
    "widen_attributes",
]
