"""Weights in an engine file: raw source weights, each stored once, and expressions that compute constants from them.

A constant is stored in one of two ways: by expression, if it is computed from stored arrays by exact operations (data movement, and IEEE
operations that round the same everywhere) and evaluation gives exactly its bytes; by value otherwise, with its expression as a record of its
origin. The stored arrays are source weights and quantized weights: a constant that was quantized and dequantized takes 8 bits per value.
Reading evaluates expressions within a budget of bytes and compares digests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from whet.engine.json_data import LARGEST, Reader
from whet.engine.layout import LazyArrays, map_in_threads, pad_to_alignment, require_whole
from whet.errors import EngineError, NetworkError
from whet.network import DTYPES, Layer, Network, Origin, Tensor, TensorType, Weight, get_dtype, parse_type, static_shape
from whet.network.text import format_value, parse_value
from whet.network.weight import compute_digest
from whet.ops import infer_layer, run_layer
from whet.ops._origin import evaluate_origin

#: operations with the same result on every machine
EXACT = frozenset(
    "Add Sub Mul Div Sqrt Reciprocal Neg Abs Cast Identity Reshape Flatten Squeeze Unsqueeze Transpose Concat Slice Split Gather Pad "
    "DequantizeLinear".split()
)
MAX_NODES = 64  # operations in the expression of one constant
_MAX_ARGS = 1024  # of one operation
_SMALL = 1 << 16  # bytes of a value that is kept for other constants
_SPARE = 1 << 24  # bytes of the budget in addition to 16 times the size of the file
_WHAT_BREAKS = (
    NetworkError, ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError, AssertionError,
    MemoryError, RecursionError, FloatingPointError,
)  # fmt: skip


def iterate_constants(net: Network) -> Iterator[Tensor]:
    """Every constant of a network and its regions, in a fixed order."""
    yield from net.constants.values()
    for layer in net.layers:
        for _, region in sorted(layer.regions.items()):
            yield from iterate_constants(region)


def get_plain_sources(net: Network) -> dict[str, np.ndarray]:
    """Source weights that constants use unchanged, by name."""
    return {name: w.array for name, w in _list_plain_sources(net).items()}


def _list_plain_sources(net: Network) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for t in iterate_constants(net):
        if t.weight is not None and t.weight.origin.op == "source":
            weights.setdefault(t.weight.origin.name, t.weight)
    return weights


# writing


@dataclass
class Pool:
    """The weights of a file: arrays by digest in order, expression nodes, and one entry per constant."""

    arrays: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)  # digest -> (name, array)
    nodes: list[list[Any]] = field(default_factory=list)
    constants: list[list[Any]] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)  # node of an inexact operation -> digest of its result, which is stored
    _numbers: dict[str, int] = field(default_factory=dict)

    def index(self) -> dict[str, Any]:
        """The JSON of the index; offsets are relative to the section of the arrays."""
        rows, at = [], 0
        for digest, (name, a) in self.arrays.items():
            rows.append([name, str(Weight(a).type), at, a.nbytes, digest])
            at = pad_to_alignment(at + a.nbytes)
        return {"weights": rows, "nodes": self.nodes, "constants": self.constants, "values": [list(v) for v in sorted(self.values.items())]}

    def node(self, entry: list[Any]) -> int:
        key = repr(entry)
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(entry)
        return self._numbers[key]


def collect(nets: Sequence[Network], sources: Mapping[str, np.ndarray], quantized: Iterable[Weight] = (), *, smallest: bool = False) -> Pool:
    """The pool from which every constant of `nets`, in order, can be computed; shared arrays are stored once.

    `quantized` are weights computed by inexact operations; expressions over them start from their values. With `smallest` a constant is stored by
    value where that takes fewer bytes than the source weights of its expression.
    """
    for net in nets:
        sources = get_plain_sources(net) | dict(sources)
    collector = _Collector(sources, {id(w.origin): w for w in quantized if w.origin.op not in EXACT}, smallest)
    for t in chain.from_iterable(map(iterate_constants, nets)):
        collector.add(t)
    pool = collector.pool
    for n in pool.nodes:
        if n[0] == "source":
            n[3] = collector.digests.get(n[1], "")  # digest of the source weight of this name
    return pool


@dataclass
class _Leaves:
    """The stored arrays that an expression is computed from: source weights by name, and results of inexact operations by the id of their origin."""

    sources: dict[str, np.ndarray] = field(default_factory=dict)
    results: dict[int, Weight] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sources or self.results)


@dataclass
class _Collector:
    """Adds constants to a pool, and the arrays of their expressions. `results`: see `_Leaves`."""

    sources: Mapping[str, np.ndarray]
    results: dict[int, Weight]
    smallest: bool
    pool: Pool = field(default_factory=Pool)
    digests: dict[str, str] = field(default_factory=dict)  # of source weights by name
    evaluated: int = 0  # bytes; a reader's budget for evaluation grows with the file
    stored_bytes: int = 0

    def add(self, t: Tensor) -> None:
        w, numbers = t.constant(), dict[int, int | None]()
        number = _add_origin(self.pool, w.origin, numbers)
        leaves = None
        if number is not None and w.origin.op != "source" and id(w.origin) not in self.results:
            leaves = _find_leaves(w.origin, self.sources, self._find_result)
        stored = None
        if not leaves or not self._add_expression(w, leaves, numbers):
            stored = w.digest
            self._store(w.digest, w.origin.name or t.name, w.array)
        self.pool.constants.append([w.digest, str(w.type), number, stored])

    def _find_result(self, origin: Origin) -> Weight | None:
        """The value of a quantized weight: a known one, or computed now from its source weights."""
        if id(origin) not in self.results and origin.op == "QuantizeLinear":
            try:
                self.results[id(origin)] = Weight(evaluate_origin(origin, self.sources), origin)
            except NetworkError:  # its source weights belong to the network before quantization
                return None
        return self.results.get(id(origin))

    def _add_expression(self, w: Weight, leaves: _Leaves, numbers: Mapping[int, int | None]) -> bool:
        """Stores the leaves of the expression of `w`; False if evaluation does not give its bytes, takes too many, or if `w` itself takes fewer."""
        for name, a in leaves.sources.items():
            if name not in self.digests:
                self.digests[name] = Weight(a).digest
        arrays = {self.digests[name]: (name, a) for name, a in sorted(leaves.sources.items())}
        for result in leaves.results.values():
            arrays[result.digest] = (f"{result.origin.op} of {w.origin.name or w.digest[:8]}", result.array)
        new_bytes = sum(a.nbytes for digest, (_, a) in arrays.items() if digest not in self.pool.arrays)
        if new_bytes > w.array.nbytes and (self.smallest or leaves.results):
            return False
        values = {number: r.digest for n, r in leaves.results.items() if (number := numbers.get(n)) is not None}
        if any(self.pool.values.get(number, digest) != digest for number, digest in values.items()):
            return False  # a refit has replaced one of two values of the same expression
        spent = _count_evaluation_bytes(w, leaves)
        leaf_bytes = sum(a.nbytes for _, a in arrays.values())
        if spent is None or self.evaluated + spent > 8 * (self.stored_bytes + leaf_bytes) + _SPARE // 2:
            return False
        self.evaluated += spent
        self.pool.values |= values
        for digest, (name, a) in arrays.items():
            self._store(digest, name, a)
        return True

    def _store(self, digest: str, name: str, array: np.ndarray) -> None:
        if digest not in self.pool.arrays:
            self.stored_bytes += array.nbytes
            self.pool.arrays[digest] = (name, array)


def _add_origin(pool: Pool, origin: Origin, seen: dict[int, int | None]) -> int | None:
    """The node of an origin; None if it has an attribute without a text form."""
    if id(origin) in seen:
        return seen[id(origin)]
    args: list[int | None] = []
    for a in origin.args:
        n = None if a is None else _add_origin(pool, a, seen)
        if a is not None and n is None:
            return None
        args.append(n)
    try:
        attrs = [[k, format_value(v)] for k, v in origin.attrs]
    except NetworkError:
        return None
    index = pool.node([origin.op, origin.name, args, attrs, origin.output, list(origin.assumes)])
    seen[id(origin)] = index
    return index


def list_sources(origin: Origin, sources: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of all sources of an expression by name; {} if one is missing or an operation is not exact."""
    return _find_leaves(origin, sources, lambda o: None).sources


def _find_leaves(origin: Origin, sources: Mapping[str, np.ndarray], find_result: Callable[[Origin], Weight | None]) -> _Leaves:
    """The leaves of an expression; none if one is missing, an operation is not exact and has no stored result, or there are too many."""
    found, todo, count = _Leaves(), [origin], 0
    while todo:
        o = todo.pop()
        count += 1
        if count > MAX_NODES:
            return _Leaves()
        if (result := find_result(o)) is not None:
            found.results[id(o)] = result
            continue
        if o.op == "source":
            if o.name not in sources:
                return _Leaves()
            found.sources[o.name] = np.asarray(sources[o.name])
        elif o.op != "literal" and o.op not in EXACT:
            return _Leaves()
        todo += [a for a in o.args if a is not None]
    return found


def _count_evaluation_bytes(w: Weight, leaves: _Leaves) -> int | None:
    """The bytes that evaluating the expression allocates; None if it does not give exactly the weight's bytes."""
    granted = 16 * sum(a.nbytes for a in (*leaves.sources.values(), *(r.array for r in leaves.results.values()))) + _SPARE
    budget = Budget(granted)
    try:
        got = _evaluate(w.origin, leaves.sources, {n: r.array for n, r in leaves.results.items()}, budget)
    except (EngineError, *_WHAT_BREAKS):
        return None
    same = got.dtype == w.array.dtype and got.shape == w.array.shape and Weight(got).digest == w.digest
    return granted - budget.left if same else None


def _evaluate(o: Origin, leaves: Mapping[str, np.ndarray], known: dict[int, np.ndarray], budget: Budget) -> np.ndarray:
    if id(o) not in known:
        if o.op == "source":
            known[id(o)] = np.asarray(leaves[o.name])
        else:
            args = [None if a is None else _evaluate(a, leaves, known, budget) for a in o.args]
            known[id(o)] = apply_op(o.op, args, dict(o.attrs), o.output, budget)
    return known[id(o)]


def _evaluate_again(origin: Origin, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    """The array of an expression; its size must have been checked."""
    return _evaluate(origin, leaves, {}, Budget(LARGEST))


# reading


@dataclass
class Budget:
    """Remaining bytes that evaluation may allocate."""

    left: int

    def spend(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise EngineError("the engine's weights would take far more memory than the file has: it is damaged or hostile")


#: origin, numbers of the arguments, digest of a stored value (of a source, or of an inexact operation, which then has no arguments), operations
Node = tuple[Origin, list[int | None], str, int]


def list_expressions(nets: Iterable[Network]) -> set[tuple[str, str]]:
    """(digest, text of the expression) of the constants."""
    return {(w.digest, _format_expression(w.origin)) for net in nets for t in iterate_constants(net) if (w := t.weight) is not None}


def _format_expression(origin: Origin) -> str:
    """The operations of an expression with their attributes, in a fixed order; "" for more operations than an engine file may have: with shared
    parts the text could grow exponentially."""
    parts: list[str] = []
    todo: list[Origin | None] = [origin]
    while todo:
        o = todo.pop()
        parts.append("none" if o is None else repr((o.op, o.name, len(o.args), o.attrs, o.output, o.assumes)))
        if len(parts) > 2 * MAX_NODES:
            return ""
        todo += () if o is None else o.args
    return "\n".join(parts)


def read_weights(
    index: Reader, data: memoryview, *, defer: bool = False, evaluated: Collection[tuple[str, str]] | None = None
) -> tuple[list[Weight], Mapping[str, np.ndarray], list[Weight]]:
    """The constants in order, with origins, by name the source weights in expressions, and the quantized weights in expressions.

    The digest of every array and constant is checked: now, or with `defer` by its first access, so that arrays that nothing reads take no time.
    `evaluated` has expressions that were evaluated before and gave these digests (see `list_expressions`): they are not evaluated again.
    Arrays are views of `data` (the mapped file). Raises EngineError.
    """
    index.object("weights", "nodes", "constants", "values")
    arrays, types = read_arrays(index["weights"], data)
    values = _read_values(index["values"], types)
    nodes = read_nodes(index["nodes"], values)
    if values and max(values) >= len(nodes):
        raise index["values"].fail(f"numbers of the {len(nodes)} nodes")
    results = [Weight.deferred(types[v], v, nodes[n][0], partial(arrays.__getitem__, v)) for n, v in values.items()]
    budget = Budget(16 * len(data) + _SPARE)
    rows = list(read_constants(index["constants"], nodes, types))
    if defer:
        return *_defer_constants(rows, nodes, arrays, budget), results
    map_in_threads(arrays.__getitem__, list(arrays))
    if evaluated is None:
        return *_compute_constants(rows, nodes, arrays, budget), results
    weights, sources = _defer_constants(rows, nodes, arrays, budget)
    for c, w in zip(rows, weights, strict=True):
        text = "" if c.stored else _format_expression(w.origin)
        if not c.stored and (not text or (c.digest, text) not in evaluated):
            _ = w.array  # evaluates it and compares its digest
    return weights, sources, results


def _read_values(rows: Reader, types: Mapping[str, TensorType]) -> dict[int, str]:
    """The digests of the stored results of inexact operations, by the numbers of their nodes."""
    values: dict[int, str] = {}
    for row in rows.rows():
        number, digest = row.rows(2)
        if digest.text(64) not in types:
            raise digest.fail("the digest of an array in the file")
        values[number.integer(max(values, default=-1) + 1)] = digest.value
    return values


@dataclass(frozen=True)
class _Constant:
    """A row of the index: the digest and type that the constant must have, the node of its expression, and whether its array is stored."""

    row: Reader
    digest: str
    type: TensorType
    node: int | None
    stored: bool

    @property
    def key(self) -> str:
        return f"{self.digest} {self.node}"

    def fail(self) -> EngineError:
        return self.row.fail("a constant that has its type and digest")


def read_constants(rows: Reader, nodes: Sequence[Node], types: Mapping[str, TensorType]) -> Iterator[_Constant]:
    """The constants, each with its stored array, its expression or both."""
    for row in rows.rows():
        digest, type_text, number, stored = row.rows(4)
        type_, node = _decode_type(type_text), None
        if number.value is not None:
            node = number.integer(0, max(len(nodes) - 1, 0))
            if not nodes:
                raise number.fail("null, as there are no expressions")
        c = _Constant(row, digest.text(64), type_, node, stored.value is not None)
        if c.stored:
            if stored.text(64) not in types:
                raise stored.fail("the digest of an array in the file")
            if stored.value != c.digest or types[c.digest] != type_:
                raise c.fail()
        elif node is None:
            raise row.fail("an expression or a stored array")
        yield c


def _compute_constants(
    rows: Sequence[_Constant], nodes: Sequence[Node], arrays: LazyArrays, budget: Budget
) -> tuple[list[Weight], dict[str, np.ndarray]]:
    values: dict[int, np.ndarray] = {}
    weights: dict[str, Weight] = {}
    computed: list[tuple[_Constant, Weight]] = []
    sources = {o.name: arrays[digest] for o, _, digest, _ in nodes if o.op == "source" and digest in arrays}
    uses = _count_uses([c.node for c in rows if c.node is not None and not c.stored], nodes)
    for c in rows:
        array = arrays[c.digest] if c.stored or c.node is None else _evaluate_node(c.node, nodes, arrays, values, uses, budget)
        if c.key not in weights:
            w = Weight(array, Origin("source") if c.node is None else nodes[c.node][0])
            if w.type != c.type:
                raise c.fail()
            if not c.stored:
                computed.append((c, w))
                if leaves := list_sources(w.origin, sources):
                    w.compute_again_by(partial(_evaluate_again, w.origin, leaves))
            object.__setattr__(w, "digest", c.digest)  # checked with the array, or below
            weights[c.key] = w
    for (c, _), got in zip(computed, map_in_threads(lambda pair: compute_digest(pair[1].type, pair[1].array), computed), strict=True):
        if got != c.digest:
            raise c.fail()
    return [weights[c.key] for c in rows], sources


def _defer_constants(rows: Sequence[_Constant], nodes: Sequence[Node], arrays: LazyArrays, budget: Budget) -> tuple[list[Weight], LazyArrays]:
    weights: dict[str, Weight] = {}
    evaluate = _Evaluation(nodes, arrays, budget)
    for c in rows:
        origin = Origin("source") if c.node is None else nodes[c.node][0]
        compute = partial(arrays.__getitem__, c.digest) if c.stored else partial(evaluate.compute, c)
        if weights.setdefault(c.key, Weight.deferred(c.type, c.digest, origin, compute)).type != c.type:
            raise c.fail()
    sources = LazyArrays({o.name: partial(arrays.__getitem__, digest) for o, _, digest, _ in nodes if o.op == "source" and digest in arrays})
    return [weights[c.key] for c in rows], sources


def join_sources(net: Network, sources: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Source weights that constants of `net` use unchanged, and those of expressions, as `read_weights` gives them."""
    if not isinstance(sources, LazyArrays):
        return get_plain_sources(net) | dict(sources)
    plain = {name: partial(getattr, w, "array") for name, w in _list_plain_sources(net).items()}
    return LazyArrays(plain | {name: partial(sources.__getitem__, name) for name in sources})


class _Evaluation:
    """Evaluates constants one by one, in any thread, within the budget of a file."""

    def __init__(self, nodes: Sequence[Node], arrays: LazyArrays, budget: Budget):
        self._nodes, self._arrays, self._budget = nodes, arrays, budget
        self._small: dict[int, np.ndarray] = {}  # values of nodes that several constants share, such as the scale of a batch norm
        self._checked: set[int] = set()

    def compute(self, constant: _Constant) -> np.ndarray:
        """The array of a constant; its type and digest are compared the first time."""
        assert constant.node is not None
        is_checked = constant.node in self._checked
        uses = _count_uses([constant.node], self._nodes)
        budget = Budget(LARGEST) if is_checked else self._budget
        array = _evaluate_node(constant.node, self._nodes, self._arrays, dict(self._small), uses, budget, self._small)
        if not is_checked:
            type_ = TensorType(get_dtype(array), tuple(array.shape))
            if type_ != constant.type or compute_digest(type_, array) != constant.digest:
                raise constant.fail()
            self._checked.add(constant.node)
        return array


def _decode_type(r: Reader) -> TensorType:
    """A static tensor type with a storable element type."""
    text = r.text(500)
    try:
        type_ = parse_type(text)
    except NetworkError as e:
        raise r.fail("a tensor type") from e
    sizes = [d for d in type_.shape if isinstance(d, int) and 0 <= d <= LARGEST]
    if len(sizes) != type_.rank or type_.rank > 32 or type_.dtype.name == "string" or str(type_) != text:
        raise r.fail("a static tensor type of numbers")
    return type_


def read_arrays(rows: Reader, data: memoryview) -> tuple[LazyArrays, dict[str, TensorType]]:
    """Arrays and their types by digest; the digest of each is compared by its first access."""
    compute: dict[str, Callable[[], np.ndarray]] = {}
    types: dict[str, TensorType] = {}
    at = end = 0
    for row in rows.rows():
        name, type_text, offset, size, digest = row.rows(5)
        name.text(10000)
        type_ = _decode_type(type_text)
        nbytes = prod(static_shape(type_.shape)) * type_.dtype.numpy.itemsize
        if size.integer() != nbytes or offset.integer() != at or at + nbytes > len(data):
            raise row.fail(f"an array of {nbytes} bytes at {at}, within the {len(data)} of the weights")
        end = at + nbytes
        if digest.text(64) in types:
            raise _make_damage_error(name.value)
        types[digest.value] = type_
        compute[digest.value] = partial(_check_array, data[at:end], type_, name.value, digest.value)
        at = pad_to_alignment(end)
        if any(data[end : min(at, len(data))]):
            raise EngineError(f"the engine is damaged: bytes after the weight '{name.value[:80]}' are not zero")
    if len(data) != end:
        raise EngineError(f"the weights have {len(data)} bytes, their index says otherwise")
    return LazyArrays(compute), types


def _check_array(raw: memoryview, type_: TensorType, name: str, digest: str) -> np.ndarray:
    """The array of these bytes. Raises EngineError if its digest is another one."""
    require_whole(raw)
    flat = np.frombuffer(raw, np.uint8).view(type_.dtype.numpy) if len(raw) else np.empty(0, type_.dtype.numpy)
    array = flat.reshape(static_shape(type_.shape))
    array.flags.writeable = False
    if compute_digest(type_, array) != digest:
        raise _make_damage_error(name)
    return array


def _make_damage_error(name: str) -> EngineError:
    return EngineError(f"the weight '{name[:80]}' is damaged: its digest does not match, or it is a duplicate")


def read_nodes(rows: Reader, stored: Mapping[int, str]) -> list[Node]:
    """The nodes of the expressions; arguments are earlier nodes. `stored`: digests of operations' results that the file has, by number."""
    nodes: list[Node] = []
    values: dict[str, Any] = {}  # of attributes by text: most are the same for all layers
    for k, row in enumerate(rows.rows()):
        if (node := _read_computed_node(row.value, k, nodes, values)) is not None:
            nodes.append((node[0], [], stored[k], 0) if k in stored else node)
            continue
        op, name, args, attrs, output, rest = row.rows(6)
        if len(args.rows()) > _MAX_ARGS:
            raise args.fail(f"at most {_MAX_ARGS} arguments")
        numbers = [None if a.value is None else a.integer(0, k - 1) for a in args.rows()]
        if op.text(100) == "source":
            if k in stored:
                raise row.fail("an operation, as its result is stored")
            digest = attrs.text(64)
            nodes.append((Origin("source", name.text(10000), assumes=_decode_assumptions(rest)), [], digest, 0))
            continue
        pairs = []
        for key, text in (p.rows(2) for p in attrs.rows()):
            try:
                if text.text(1 << 20) not in values:
                    values[text.value] = parse_value(text.value)
                pairs.append((key.text(200), values[text.value]))
            except _WHAT_BREAKS as e:
                raise text.fail("an attribute's value") from e
        parents = [None if n is None else nodes[n][0] for n in numbers]
        cost = 1 + sum(nodes[n][3] for n in numbers if n is not None)
        origin = Origin(op.value, name.text(10000), tuple(parents), tuple(pairs), output.integer(0, 10**6), _decode_assumptions(rest))
        nodes.append((origin, [], stored[k], 0) if k in stored else (origin, numbers, "", cost))
    return nodes


def _read_computed_node(row: Any, k: int, nodes: Sequence[Node], values: Mapping[str, Any]) -> Node | None:
    """Node `k` if it is a valid operation whose attributes have known values: most rows are, and this takes a fraction of the time. None for
    any other row, which is then read piece by piece."""
    if type(row) is not list or len(row) != 6:
        return None
    op, name, args, attrs, output, rest = row
    is_plain = type(op) is str and op != "source" and len(op) <= 100 and name == "" and rest == [] and type(output) is int and 0 <= output <= 10**6
    if not is_plain or type(args) is not list or type(attrs) is not list or len(args) > _MAX_ARGS:
        return None
    if not all(a is None or (type(a) is int and 0 <= a < k) for a in args):
        return None
    pairs = []
    for pair in attrs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or len(pair[0]) > 200 or type(pair[1]) is not str:
            return None
        if pair[1] not in values:
            return None
        pairs.append((pair[0], values[pair[1]]))
    cost = 1 + sum(nodes[n][3] for n in args if n is not None)
    return Origin(op, "", tuple(None if n is None else nodes[n][0] for n in args), tuple(pairs), output), args, "", cost


def _decode_assumptions(r: Reader) -> tuple[str, ...]:
    return tuple(a.text(10000) for a in r.rows())


def _count_uses(constants: Iterable[int], nodes: Sequence[Node]) -> dict[int, int]:
    """How often the value of each node is read, by constants (their nodes are given) and by the nodes that constants need."""
    uses: dict[int, int] = {}
    todo = list(constants)
    while todo:
        n = todo.pop()
        uses[n] = uses.get(n, 0) + 1
        if uses[n] == 1:
            todo += [a for a in nodes[n][1] if a is not None]
    return uses


def _evaluate_node(
    node: int,
    origins: Sequence[Node],
    arrays: Mapping[str, np.ndarray],
    values: dict[int, np.ndarray],
    uses: dict[int, int],
    budget: Budget,
    small: dict[int, np.ndarray] | None = None,
) -> np.ndarray:
    """The array of an expression; each node is evaluated once. A value is dropped after its last use (`uses`), as intermediate values of all weights
    together are several times the model. New small values are added to `small`."""
    if origins[node][3] > MAX_NODES:
        raise EngineError(f"a constant takes more than {MAX_NODES} operations: the engine is damaged or hostile")
    order, todo, seen = [], [node], {node}
    while todo:
        n = todo.pop()
        if n in values:
            continue
        order.append(n)
        for a in origins[n][1]:
            if a is not None and a not in seen:
                seen.add(a)
                todo.append(a)
    for n in sorted(order):  # arguments have smaller numbers
        origin, args, digest, _ = origins[n]
        if digest or origin.op == "source":
            if digest not in arrays:
                raise EngineError(f"the source weight '{origin.name[:80]}' is not in the engine, but a constant is computed from it")
            values[n] = arrays[digest]
            continue
        if origin.op != "literal" and origin.op not in EXACT:
            raise EngineError(f"a constant is computed by {origin.op[:40]}, which is not an exact operation: it should be stored by value")
        try:
            given = [None if a is None else values[a] for a in args]
            values[n] = apply_op(origin.op, given, dict(origin.attrs), origin.output, budget)
        except _WHAT_BREAKS as e:
            raise EngineError(f"a constant cannot be computed: {origin.op[:40]}: {str(e)[:200]}") from e
        if small is not None and values[n].nbytes <= _SMALL:
            small[n] = values[n]
        for a in args:
            if a is not None:
                _drop_after_last_use(a, values, uses)
    found = values[node]
    _drop_after_last_use(node, values, uses)
    return found


def _drop_after_last_use(node: int, values: dict[int, np.ndarray], uses: dict[int, int]) -> None:
    uses[node] -= 1
    if uses[node] == 0:
        values.pop(node, None)


def apply_op(op: str, args: list[np.ndarray | None], attrs: dict[str, Any], output: int, budget: Budget) -> np.ndarray:
    """One operation on arrays; the size of the result is inferred and charged to the budget before it is computed."""
    if op == "literal":
        values, dtype = attrs["values"], attrs["dtype"]
        if dtype not in DTYPES.values() or dtype.name == "string" or not isinstance(values, tuple):
            raise EngineError("a literal has no numeric values")
        return np.array(values, dtype.numpy).reshape(attrs["shape"])
    tensors = [None if a is None else Tensor(f"w{i}", Weight(a).type, weight=Weight(a)) for i, a in enumerate(args)]
    layer = Layer(op, "weight", tensors, attrs)
    types, _ = infer_layer(layer)
    for t in types:
        if not t.static:
            raise EngineError(f"{op} gives a weight of unknown size")
        budget.spend(prod(static_shape(t.shape)) * t.dtype.numpy.itemsize)
    layer.outputs = tuple(Tensor(f"y{i}", t, layer, i) for i, t in enumerate(types))
    got = run_layer(layer, args)
    if not 0 <= output < len(got) or got[output].shape != types[output].shape:
        raise EngineError(f"{op} gives no weight {output} of the stated type")
    return np.ascontiguousarray(got[output]).reshape(got[output].shape)
