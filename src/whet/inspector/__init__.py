"""Engine inspection: JSON in TensorRT's format, layer tables, explanations of the selection."""

from whet.inspector.explain import explain
from whet.inspector.facts import LayerFacts, find_layer, layer_facts
from whet.inspector.information import COLUMNS, engine_information, layer_lines, layer_rows
from whet.inspector.records import output_records, profile_records, times_records
from whet.inspector.sparse_layers import LayerSparsity, layer_sparsity, sparsity_lines, sparsity_rows

__all__ = [
    "COLUMNS", "LayerFacts", "LayerSparsity", "engine_information", "explain", "find_layer", "layer_facts", "layer_lines", "layer_rows",
    "layer_sparsity", "output_records", "profile_records", "sparsity_lines", "sparsity_rows", "times_records",
]  # fmt: skip
