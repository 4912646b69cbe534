"""Converts a graph's nodes into layers with the readers that the ops define."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto

from whet.errors import FrontendError, NetworkError, UnsupportedError
from whet.frontends._onnx_advice import DAMAGED, format_op, make_unsupported_error, why_no_reader
from whet.frontends._onnx_attrs import check_form, read_node_attributes
from whet.frontends._onnx_constants import fold, read_constant
from whet.frontends._onnx_functions import expand, find_schema_function, is_defined_by_others, list_schema_defaults
from whet.frontends._onnx_load import list_initializers, read_opsets
from whet.frontends._onnx_node import Node
from whet.frontends._onnx_order import cut_graph, sort_nodes
from whet.frontends._onnx_shapes import SymbolTable, read_value_type
from whet.frontends._onnx_tensors import get_onnx_dtype, read_onnx_array, read_sparse_array
from whet.network import Network, Origin, Tensor, TensorType, Weight
from whet.ops import OPS, Counter, FoldBudget, GrowingSequence, NoValue, Op, ReadValue, TensorSequence
from whet.plugin_packages import load_installed

_DEEPEST = 32  # nesting depth of functions and subgraphs; real models have 3
_MOST_NODES = 300_000  # after inlining; nested functions could expand exponentially
InputType = TensorType | Counter | GrowingSequence  # of an input of a subgraph
# Exceptions that a reader may raise for a schema-valid node with invalid values (a zero stride, a wrong rank).
_BAD_VALUES = (IndexError, AttributeError, TypeError, KeyError, ValueError, OverflowError, ArithmeticError, MemoryError, RecursionError)


def get_onnx_readers() -> dict[str, Op]:
    """Maps an ONNX op (other domains: `domain.op`) to the op that reads it."""
    load_installed()
    readers: dict[str, Op] = {}
    for o in OPS.values():
        for name in o.onnx_ops:
            if name not in readers or o.name == name:
                readers[name] = o
    return readers


class NotReached(UnsupportedError):
    """A node was not read because an input comes from an unsupported node."""


class Scope(MutableMapping[str, Any]):
    """Names -> values (ReadValue) of this graph, then of the outer graph. Initializers become constants when first read.

    `unknown` maps values of unreadable nodes to the node; reading one raises NotReached.
    """

    def __init__(self, net: Network, folder: Path | None, outer: Scope | None = None):
        self.net, self.folder, self.outer = net, folder, outer
        self.own: dict[str, ReadValue] = {}
        self.initializers: dict[str, TensorProto | SparseTensorProto] = {}
        self.unknown: dict[str, str] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.initializers or name in self.unknown or (self.outer is not None and name in self.outer)

    def __getitem__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        if name in self.initializers:
            stored, subject = self.initializers[name], f"the weight {name!r}"
            if isinstance(stored, SparseTensorProto):
                array = read_sparse_array(stored, self.folder, subject)
            else:
                array = read_onnx_array(stored, self.folder, subject)
            weight = Weight(array, Origin("source", name))
            self.own[name] = t = self.net.constant(weight, name)
            return t
        if name in self.unknown:
            raise NotReached(f"not read: its input {name!r} comes from node '{self.unknown[name]}', which is not supported")
        if self.outer is None:
            raise KeyError(name)
        return self.outer[name]

    def __setitem__(self, name: str, value: ReadValue) -> None:
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self):
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


@dataclass
class GraphReader:
    """State shared by all graphs of a model: functions, folder, symbols, and the callback for unreadable nodes."""

    functions: Mapping[tuple[str, str, str], FunctionProto]
    folder: Path | None
    symbols: SymbolTable
    on_problem: Callable[[NodeProto, str, Exception, Scope], None] | None = None  # (node, name, error, scope); None: raise the error
    on_node: Callable[[NodeProto, str], None] | None = None
    readers: dict[str, Op] = field(default_factory=get_onnx_readers)
    depth: int = 0
    nodes: int = 0
    most_nodes: int = _MOST_NODES
    budget: FoldBudget = field(default_factory=lambda: FoldBudget(0))
    counters: set[Tensor] = field(default_factory=set)

    def read(
        self,
        graph: GraphProto,
        scope: Scope,
        versions: Mapping[str, int],
        types: Mapping[str, InputType],
        prefix: str = "",
    ) -> list[ReadValue]:
        """Adds the graph's layers to `scope.net`; returns its outputs.

        `types` are its inputs' types, or a sequence, which is no input of the network; `prefix` is prepended to generated node names.
        """
        net = scope.net
        for name, t in list_initializers(graph):
            if name in scope.initializers:
                raise FrontendError(f"the weight {name!r} appears twice in the model. {DAMAGED}")
            scope.initializers[name] = t
        for info in graph.input:
            if info.name in scope.initializers:
                declared, stored = info.type.tensor_type.elem_type, scope.initializers[info.name]
                if declared and declared != (stored.values if isinstance(stored, SparseTensorProto) else stored).data_type:
                    raise FrontendError(f"the weight {info.name!r} is listed as an input of another element type. {DAMAGED}")
                continue
            if info.name in scope.own or not info.name:
                raise FrontendError(f"two inputs are called {info.name!r}. {DAMAGED}")
            given = types[info.name]
            if isinstance(given, GrowingSequence):
                scope[info.name] = given
            else:
                scope[info.name] = added = net.add_input(info.name, given.type if isinstance(given, Counter) else given)
                self.counters |= {added} if isinstance(given, Counter) else set()
        taken = {*scope.own, *scope.initializers}
        for node in graph.node:
            if clash := next((o for o in node.output if o in taken), None):
                raise FrontendError(f"node '{node.name}' ({node.op_type}) produces {clash!r}, which is an input or a weight. {DAMAGED}")
        self.read_nodes(graph.node, scope, versions, prefix)
        outputs: list[ReadValue] = []
        for info in graph.output:
            if info.name not in scope:
                raise FrontendError(f"the output {info.name!r} has no producer. {DAMAGED}")
            if info.name in scope.unknown:
                continue
            outputs.append(t := scope[info.name])
            code = info.type.tensor_type.elem_type
            if not isinstance(t, Tensor):
                if code:
                    raise FrontendError(f"the output {info.name!r} is declared as a tensor, but computed as a sequence. {DAMAGED}")
                continue
            if code and get_onnx_dtype(code, f"the output {info.name!r}") != t.dtype:
                raise FrontendError(
                    f"the output {info.name!r} is declared as {get_onnx_dtype(code, info.name)}, but computed as {t.dtype}. {DAMAGED}"
                )
        return outputs

    def read_nodes(self, nodes: Sequence[NodeProto], scope: Scope, versions: Mapping[str, int], prefix: str = "") -> None:
        """Adds the layers of `nodes` in execution order."""
        if self.depth >= _DEEPEST:
            raise FrontendError(
                f"functions or subgraphs are nested more than {_DEEPEST} deep, perhaps recursively. Export the model again."
            )
        self.depth += 1
        try:
            for name, node in sort_nodes(nodes, scope, prefix):
                self._try_node(node, name, scope, versions)
        finally:
            self.depth -= 1

    def _try_node(self, node: NodeProto, name: str, scope: Scope, versions: Mapping[str, int]) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        self.nodes += 1
        if self.nodes > self.most_nodes:
            raise FrontendError(f"with its functions inlined the model has more than {self.most_nodes:,} nodes. Export it without them.")
        if self.on_node is not None:
            self.on_node(node, name)
        try:
            self._read_node(node, name, domain, scope, versions)
        except (NetworkError, FrontendError, *_BAD_VALUES) as e:
            problem = _with_node(e, node, name, domain)
            if self.on_problem is None:
                raise problem from e
            self.on_problem(node, name, problem, scope)

    def _read_node(self, node: NodeProto, name: str, domain: str, scope: Scope, versions: Mapping[str, int]) -> None:
        f = self.functions.get((node.domain, node.op_type, node.overload))
        if f is not None:
            self.read_nodes(expand(node, f, name), scope, read_opsets(f.opset_import, f"the function {f.name}"))
            return
        inputs = [scope[n] if n else None for n in node.input]
        op = self.readers.get(format_op(domain, node.op_type))
        opset = versions.get(domain, 1)
        others = [n for n, v in zip(node.input, inputs, strict=True) if _no_tensor(v)]
        if others and (op is None or not op.reads_sequences):
            raise make_unsupported_error(
                name, domain, node.op_type, f"its input {others[0]!r} is a sequence or an absent value, but the op takes tensors"
            )
        if op is None and not (not domain and node.op_type == "Constant"):
            body = find_schema_function(node, domain, opset, [None if t is None else t.type for t in inputs])
            if body is None or not self._readable(body):
                before = tuple(n for n, t in zip(node.input, inputs, strict=True) if t is not None and not t.is_constant)
                raise make_unsupported_error(name, domain, node.op_type, why_no_reader(domain, node.op_type, self.readers, before))
            nodes = expand(node, body, name, list_schema_defaults(node.op_type, domain, opset))
            self.read_nodes(nodes, scope, {**versions, **read_opsets(body.opset_import, f"the definition of {node.op_type}")})
            return
        check_form(node, name, domain, opset)
        if opset < 9 and node.op_type in ("Scan", "Upsample"):
            raise make_unsupported_error(
                name, domain, node.op_type, f"its semantics at opset {opset} differ; export the model with opset 13 or newer"
            )
        attrs = read_node_attributes(node, name, domain, self.folder)
        if opset < 9 and attrs.get("spatial") == 1:
            del attrs["spatial"]  # BatchNormalization up to opset 8: the default, and the only mode since
        net, start = scope.net, len(scope.net.layers)
        if op is None:
            weight = Weight(read_constant(attrs, name), Origin("source", node.output[0]))
            scope[node.output[0]] = net.constant(weight, node.output[0])
            return
        view = Node(node.op_type, domain, opset, name, inputs, attrs, list(node.output), counters=self.counters)
        self._add_graphs(view, node, scope, versions)
        results = op.onnx(view, net) if op.onnx is not None else _read_unchanged(op, view, net)
        outputs = [results] if isinstance(results, ReadValue) else list(results)
        tensors = [t for t in outputs if t is None or isinstance(t, Tensor)]
        complete = not others and len(tensors) == len(outputs)
        folded = fold(net, start, tensors, inputs, list(node.output), self.budget) if complete else None
        self._bind(node, name, scope, folded or _rename_outputs(net, start, outputs, node.output))

    def _readable(self, body: FunctionProto) -> bool:
        """True if all ops of a function body have readers (functions may nest once)."""
        for n in body.node:
            if n.domain or not (n.op_type in self.readers or n.op_type == "Constant" or is_defined_by_others(n.op_type, body)):
                return False
        return True

    def _bind(self, node: NodeProto, name: str, scope: Scope, outputs: Sequence[ReadValue | None]) -> None:
        for i, out in enumerate(node.output):
            if not out:
                continue
            output = outputs[i] if i < len(outputs) else None
            if output is None:
                raise make_unsupported_error(
                    name,
                    "",
                    node.op_type,
                    f"its output {i} ({out!r}) is used, but whet's {node.op_type} does not produce it; export for inference",
                )
            scope[out] = output

    def _add_graphs(self, view: Node, node: NodeProto, scope: Scope, versions: Mapping[str, int]) -> None:
        protos = {a.name: a.g for a in node.attribute if a.type == AttributeProto.GRAPH}

        def prefix(key: str) -> str:
            return f"{view.name}/{key}/"

        def region(key: str) -> Callable[..., Network]:
            def build(types: Sequence[InputType | None] = (), *, strict: bool = False, only: Sequence[int] = ()) -> Network:
                if strict and self.on_problem is not None:
                    on_problem, self.on_problem = self.on_problem, None
                    try:
                        return build(types, only=only)
                    finally:
                        self.on_problem = on_problem
                proto = cut_graph(protos[key], only) if only else protos[key]
                inner = Scope(Network(key, scope.net.stage), self.folder, scope)
                known = {}
                for i, info in enumerate(proto.input):
                    given = types[i] if i < len(types) else None
                    known[info.name] = given or read_value_type(info, self.symbols, f"input {info.name!r} of the {key} of node '{view.name}'")
                values = self.read(proto, inner, versions, known, prefix(key))
                view.lengths[key] = [_count_tensors(v) for v in values]
                for info, v in zip(proto.output, values, strict=True):
                    mark_value(inner.net, v, info.name)
                return inner.net

            return build

        def inline(key: str, g: Network, inputs: Sequence[ReadValue]) -> list[Any]:
            proto = protos[key]
            inner = Scope(g, self.folder, scope)
            for info, t in zip(proto.input, inputs, strict=True):
                inner[info.name] = t
            bare = GraphProto(
                node=proto.node, initializer=proto.initializer, output=proto.output, sparse_initializer=proto.sparse_initializer
            )
            return self.read(bare, inner, versions, {}, prefix(key))

        view.graphs = {key: region(key) for key in protos}
        view.inline_graph = inline if protos else None


def mark_value(region: Network, value: ReadValue, name: str) -> None:
    """As mark_output; the tensors of a sequence become the outputs `name_0`, `name_1`, and so on.

    Raises UnsupportedError for an absent value, and for a sequence whose length is not known.
    """
    if isinstance(value, Tensor):
        mark_output(region, value, name)
    elif isinstance(value, TensorSequence | GrowingSequence):
        for i, t in enumerate(value.tensors if isinstance(value, TensorSequence) else value.appended):
            mark_output(region, t, f"{name}_{i}")
    elif isinstance(value, NoValue):
        raise UnsupportedError(f"the output {name!r} is an absent optional value; whet returns tensors")
    else:
        raise UnsupportedError(f"the output {name!r} is a sequence of as many tensors as a loop appends; whet returns tensors: concatenate them")


def _count_tensors(value: ReadValue) -> int | None:
    """The number of tensors of a sequence whose length is known, as outputs of a region; None for a tensor."""
    if isinstance(value, TensorSequence):
        return len(value.tensors)
    return len(value.appended) if isinstance(value, GrowingSequence) else None


def _no_tensor(value: object) -> bool:
    return not isinstance(value, Tensor | None)


def mark_output(region: Network, t: Tensor, name: str) -> None:
    """Makes `t` an output of a region; a captured value passes through an Identity, so that it keeps its name."""
    if t.maker is not None and not any(t.maker is layer for layer in region.layers):
        t = region.add("Identity", t, name=name)
    region.mark_output(t, name)


def _read_unchanged(op: Op, node: Node, net: Network):
    """The default reader: inputs and attributes unchanged; undeclared attributes are refused."""
    unknown = sorted(set(node.attrs) - set(op.attrs))
    if unknown:
        raise node.unsupported(
            f"whet's {op.name} has no attribute {', '.join(unknown)}; it has {', '.join(op.attrs) or 'none'}. Export without it"
        )
    if node.graphs:
        return node.add(net, op.name, *node.inputs, regions={k: build() for k, build in node.graphs.items()}, **node.attrs)
    return node.add(net, op.name, *node.inputs, **node.attrs)


def _rename_outputs(net: Network, start: int, outputs: Sequence[ReadValue | None], wishes: Sequence[str]) -> Sequence[ReadValue | None]:
    """Renames the produced tensors to the node's output names, also when a reader added several layers."""
    added = net.layers[start:]
    tensors = {t.name: t for layer in added for t in layer.outputs}
    for t, wish in zip(outputs, wishes, strict=False):
        if not isinstance(t, Tensor) or not wish or t.name == wish or not any(t.maker is layer for layer in added):
            continue
        holder = tensors.get(wish)
        if holder is not None:
            holder.name = net.fresh(f"{wish}_inner")
            t.name = wish
        else:
            t.name = net.fresh(wish)
    return outputs


def _with_node(e: Exception, node: NodeProto, name: str, domain: str) -> Exception:
    """Converts an exception to a whet error that names the node."""
    label = f"node '{name}' ({format_op(domain, node.op_type)})"
    text = str(e)
    if isinstance(e, FrontendError | UnsupportedError):
        return e if "node '" in text else type(e)(f"{label}: {text}")
    if isinstance(e, NetworkError):
        return FrontendError(
            f"{label}: {text}. Its inputs or attributes do not fit together: check the model with onnx.checker, or export it again."
        )
    return FrontendError(
        f"{label} has inputs or attributes that do not fit together ({type(e).__name__}: {text[:200]}). "
        f"Check the model with onnx.checker, or export it again."
    )
