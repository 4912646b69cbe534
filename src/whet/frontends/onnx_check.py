"""Reports the unsupported nodes of an ONNX model (`whet check model.onnx`), by trying to read every node."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto

from whet.errors import FrontendError, NetworkError
from whet.frontends._onnx_advice import format_op, make_unsupported_error, why_no_reader
from whet.frontends._onnx_functions import find_schema_function
from whet.frontends._onnx_graph import NotReached, Scope, get_onnx_readers
from whet.frontends._onnx_load import load_model, read_opsets
from whet.frontends._onnx_shapes import SymbolTable, UserShapes, find_plain_names, read_value_type
from whet.frontends.onnx import Source, get_metadata, read_input_types, read_model

_TIMEOUT = 120  # seconds for shape inference; large models take one second


@dataclass(frozen=True)
class Problem:
    """A node that cannot be read, with the reason and the nearest workaround. `reached` is False if it only depends on such a node.

    `index` is that of the node of the main graph which it is or which contains it; -1 if the format has no such order.
    """

    node: str
    op: str
    reason: str
    reached: bool = True
    index: int = -1


@dataclass
class Report:
    """Contents and unsupported nodes of a model. `ops` counts nodes per op, including function bodies."""

    source: str
    opset: int
    opsets: dict[str, int]
    producer: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    parameters: int
    parameter_bytes: int
    nodes: int  # of the main graph
    tried: int = 0  # nodes that were read or failed, with those of functions and subgraphs
    layers: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unit: str = "node"  # what the model's format calls an operation

    @property
    def supported(self) -> bool:
        """True if every node can be read."""
        return not self.problems

    def verdict(self) -> str:
        """One sentence: everything is supported, or how many of the tried ones cannot be read."""
        if self.supported:
            return f"every {self.unit} is supported"
        total = max(self.tried, self.nodes, sum(self.ops.values()))
        inner = " (with those of functions and subgraphs)" if total > self.nodes else ""
        return f"{len(self.problems)} of {total} {self.unit}s{inner} cannot be read"

    def unsupported_ops(self) -> dict[str, int]:
        """Number of unsupported nodes per op, without nodes that only depend on these."""
        return dict(Counter(p.op for p in self.problems if p.reached).most_common())

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {**asdict(self), "supported": self.supported}

    def __str__(self) -> str:
        origin = ", ".join([*([f"opset {self.opset}"] if self.opset else []), self.producer or "producer unknown"])
        lines = [
            f"{self.source}: {origin}; {self.nodes} {self.unit}s, {self.parameters} parameters",
            *(f"  input  {n}: {t}" for n, t in self.inputs.items()),
            *(f"  output {n}: {t}" for n, t in self.outputs.items()),
            "  ops: " + ", ".join(f"{n} {op}" for op, n in self.ops.items()),
        ]
        lines += [f"  {'not supported' if p.reached else 'follows'}: {p.reason}" for p in self.problems]
        return "\n".join([*lines, f"  {self.verdict()}"])


def check_onnx(source: Source, *, shapes: UserShapes | None = None, infer_types: bool = True, folder: Path | None = None) -> Report:
    """Tries every node of a model and reports all that fail, not only the first. `folder` has external weights of a model in bytes.

    The output types of a failed node come from ONNX's shape inference, so that the following nodes are tried too
    (not with `infer_types` False, which starts no process).
    Raises FrontendError for a file that is not a readable model.
    """
    model, home = load_model(source)
    graph = model.graph
    versions = read_opsets(model.opset_import, "the model")
    meta = get_metadata(model)
    table = SymbolTable(find_plain_names(graph.input))
    weights = [t for t in graph.initializer]
    report = Report(
        source=str(source) if isinstance(source, str | Path) else graph.name or "the model",
        opset=versions.get("", 0),
        opsets={k or "ai.onnx": v for k, v in versions.items()},
        producer=" ".join(filter(None, (meta.get("producer_name"), meta.get("producer_version")))),
        inputs={n: str(t) for n, t in read_input_types(graph, table, shapes).items()},
        outputs={o.name: _format_declared_type(o) for o in graph.output},
        parameters=sum(_count(t) for t in weights),
        parameter_bytes=sum(len(t.raw_data) or _count(t) * 4 for t in weights),
        nodes=len(graph.node),
    )
    inferred = _Inferred(model if infer_types else None)
    counts: Counter[str] = Counter()
    tried: set[tuple[str, ...]] = set()  # by name and outputs, because a Loop reads its body more than once
    failed: set[tuple[str, ...]] = set()
    readers, functions = get_onnx_readers(), {(f.domain, f.name) for f in model.functions}
    makers = {out: i for i, node in enumerate(graph.node) for out in node.output if out}
    current = -1  # the node of the main graph that is being read, with those of its function or subgraphs

    def on_node(node: NodeProto, name: str) -> None:
        nonlocal current
        current = next((makers[out] for out in node.output if out in makers), current)
        if (key := (name, *node.output)) not in tried:
            counts[format_op(node.domain, node.op_type)] += 1
        tried.add(key)

    def on_problem(node: NodeProto, name: str, problem: Exception, scope: Scope) -> None:
        if isinstance(problem, NotReached) and (node.domain, node.op_type) not in functions and not reads_op(node.op_type, node.domain):
            problem = make_unsupported_error(name, node.domain, node.op_type, why_no_reader(node.domain, node.op_type, readers))
        # After a first failure a type mismatch may come from the less precise inferred type: not a separate problem.
        follows = isinstance(problem, NotReached) or (isinstance(problem, FrontendError) and report.problems)
        if (key := (name, *node.output)) not in failed:
            report.problems.append(Problem(name, format_op(node.domain, node.op_type), str(problem), not follows, current))
        failed.add(key)
        inferred.stand_in(node, name, scope)

    net = read_model(model, folder or home, shapes, on_node=on_node, on_problem=on_problem)
    report.layers, report.tried = len(net.layers), len(tried)
    report.ops = dict(counts.most_common())
    report.outputs |= {t.name: str(t.type) for t in net.outputs}
    return report


def reads_op(op: str, domain: str = "") -> bool:
    """True if nodes of an op can be read: whet has a reader, or ONNX defines the op by others that have one."""
    readers = get_onnx_readers()
    if format_op(domain, op) in readers or (op == "Constant" and not domain):
        return True
    body = find_schema_function(NodeProto(op_type=op, domain=domain), domain, onnx.defs.onnx_opset_version(), [])
    return body is not None and all(not n.domain and (n.op_type in readers or n.op_type == "Constant") for n in body.node)


class _Inferred:
    """Types of values by ONNX's shape inference, which runs only after a failure."""

    def __init__(self, model: onnx.ModelProto | None):
        self.model = model  # None: no types are inferred
        self.found: dict[str, onnx.ValueInfoProto] | None = None
        self.table = SymbolTable()

    def stand_in(self, node: NodeProto, name: str, scope: Scope) -> None:
        """Defines the outputs of `node` as inputs of the inferred types; marks outputs of unknown type."""
        for out in node.output:
            if not out:
                continue
            info = self._types().get(out)
            try:
                if info is not None and info.type.tensor_type.HasField("shape"):
                    scope[out] = scope.net.add_input(scope.net.fresh(f"{out}_unread") + "_", read_value_type(info, self.table, repr(out)))
                    continue
            except NetworkError:
                pass  # a sequence or an unsupported type: its readers cannot be tried
            scope.unknown[out] = name

    def _types(self) -> dict[str, onnx.ValueInfoProto]:
        if self.found is None:
            self.found = {} if self.model is None else {v.name: v for v in _infer_values(self.model)}
        return self.found


_INFER = """
import sys, onnx
model = onnx.ModelProto.FromString(sys.stdin.buffer.read())
sys.stdout.buffer.write(onnx.shape_inference.infer_shapes(model, strict_mode=False, data_prop=True).SerializeToString())
"""


def _infer_values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The values typed by onnx's shape inference, or [] if it fails. In a subprocess, since it may abort on damaged models."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _INFER], input=model.SerializeToString(), capture_output=True, timeout=_TIMEOUT, check=True
        )
        graph = onnx.ModelProto.FromString(done.stdout).graph
    except (subprocess.SubprocessError, OSError, ValueError, DecodeError):
        return []  # too large or malformed: nodes after a failed one are reported as not tried
    return [*graph.value_info, *graph.output]


def _format_declared_type(info: onnx.ValueInfoProto) -> str:
    try:
        return str(read_value_type(info, SymbolTable(find_plain_names([info])), info.name))
    except (NetworkError, FrontendError):
        return "unknown"


def _count(t: onnx.TensorProto) -> int:
    n = 1
    for d in t.dims:
        n *= d
    return n
