"""Op definitions: attributes, output types, NumPy reference, samples, coupled axes. One file each, which is imported when the op is looked up."""

from whet.ops._base import (
    OPS,
    OPTIONAL,
    REQUIRED,
    Couple,
    Op,
    Sample,
    find_given_dims,
    find_given_ints,
    find_known_values,
    get_op,
    has_symbols,
    infer_layer,
    is_data_sized,
    op,
    require_known_ints,
)
from whet.ops._folding import FoldBudget
from whet.ops._images import Axes, BatchAxis, NotPerImage, follow, list_fused_layers, list_fused_results
from whet.ops._interpret import bind_layer, bind_symbols, count_region_steps, run_layer, run_network, run_regions, widen_attributes
from whet.ops._origin import evaluate_origin
from whet.ops._samples import sample_arrays, sample_layer
from whet.ops._sequences import Counter, GrowingSequence, NoValue, ReadValue, TensorSequence
from whet.ops._touching import batch_symbol, why_samples_touch
from whet.ops._types import broadcast, infer_same_as_input, list_same_axis_couples, normalize_axis

__all__ = [
    "OPS",
    "OPTIONAL",
    "REQUIRED",
    "Axes",
    "BatchAxis",
    "Counter",
    "Couple",
    "FoldBudget",
    "GrowingSequence",
    "NoValue",
    "NotPerImage",
    "Op",
    "ReadValue",
    "Sample",
    "TensorSequence",
    "batch_symbol",
    "bind_layer",
    "bind_symbols",
    "broadcast",
    "count_region_steps",
    "evaluate_origin",
    "find_given_dims",
    "find_given_ints",
    "find_known_values",
    "follow",
    "get_op",
    "has_symbols",
    "infer_layer",
    "infer_same_as_input",
    "is_data_sized",
    "list_fused_layers",
    "list_fused_results",
    "list_same_axis_couples",
    "normalize_axis",
    "op",
    "require_known_ints",
    "run_layer",
    "run_network",
    "run_regions",
    "sample_arrays",
    "sample_layer",
    "why_samples_touch",
    "widen_attributes",
]
