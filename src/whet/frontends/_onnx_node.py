"""The node view that op readers get: `read(node, g)` in src/whet/ops/<op>.py adds layers to network `g` and returns its outputs.

node.op, node.domain, node.opset      "Conv", "", 17
node.name, node.outputs               the node's name (generated if absent), names of its outputs ("" for an unused one)
node.inputs                           tensors of `g` (or of an outer network); None for an absent optional input; TensorSequence or NoValue
                                      only for ops with reads_sequences
node.attrs                            Python values: int, float, str, tuples of them, np.ndarray for tensors
node.graphs                           name -> function building that subgraph: graphs["body"](input types) -> region Network;
                                      with strict=True errors are raised also where `check_onnx` collects them; with only=(0, 2)
                                      it has these outputs and the nodes that they need
node.counters                         inputs of the loops around the node that count iterations from a value of at least 0
node.add(g, "Op", *inputs, **attrs)   adds a layer under the node's names; returns its output, or a tuple of them
node.inline("then_branch", g)         adds a subgraph's layers to `g` itself; returns its outputs
node.dtype(code)                      the DType of an ONNX type code (Cast's `to`)
raise node.unsupported("...")         with the reason and the nearest workaround
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from whet.errors import UnsupportedError
from whet.frontends._onnx_advice import make_unsupported_error
from whet.frontends._onnx_tensors import get_onnx_dtype
from whet.network import DType, Network, Tensor
from whet.ops import TensorSequence

BuildRegion = Callable[..., Network]  # build(input types or nothing, strict=False, only=()) -> Network


@dataclass
class Node:
    """One ONNX node with resolved inputs and Python attribute values."""

    op: str
    domain: str
    opset: int
    name: str
    inputs: list[Tensor | None]
    attrs: dict[str, Any]
    outputs: list[str]
    graphs: dict[str, BuildRegion] = field(default_factory=dict)
    inline_graph: Callable[[str, Network, Sequence[Tensor]], list[Tensor]] | None = None
    counters: Set[Tensor] = frozenset()
    lengths: dict[str, list[int | None]] = field(default_factory=dict)  # of a built subgraph: per output None, or its sequence's length

    def input(self, i: int) -> Tensor | None:
        """Input `i`, or None when it is absent or not given."""
        return self.inputs[i] if i < len(self.inputs) else None

    def add(self, g: Network, op: str, *inputs: Tensor | None, **attrs: Any) -> Any:
        """Adds a layer under the node's name and infers its types. Returns its output, or a tuple of several."""
        regions = attrs.pop("regions", None)
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        layer = g.add_layer(op, trimmed, attrs, name=self.name, outputs=self.outputs, regions=regions, sources=(self.name,))
        return layer.outputs[0] if len(layer.outputs) == 1 else layer.outputs

    def join_sequences(self, key: str, outputs: Sequence[Tensor]) -> list[Tensor | TensorSequence]:
        """The tensors `outputs` of a layer with the built subgraph `key`, with its sequences put together again."""
        tensors = iter(outputs)
        return [next(tensors) if n is None else TensorSequence(tuple(islice(tensors, n))) for n in self.lengths[key]]

    def inline(self, key: str, g: Network, inputs: Sequence[Tensor] = ()) -> list[Tensor]:
        """Adds the layers of subgraph `key` to `g`, with `inputs` as its inputs; returns its output tensors."""
        if self.inline_graph is None:
            raise self.unsupported(f"it has no subgraph {key!r}")
        return self.inline_graph(key, g, inputs)

    def dtype(self, code: int) -> DType:
        """The element type of an ONNX type code. Raises UnsupportedError."""
        return get_onnx_dtype(code, f"node '{self.name}' ({self.op})")

    def unsupported(self, reason: str) -> UnsupportedError:
        """The error to raise for this node; `reason` gives the cause and the nearest workaround."""
        return make_unsupported_error(self.name, self.domain, self.op, reason)
