"""Seeded random networks with inputs, and the comparison of results, for tests of passes, builder and runtime."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import groupby

import numpy as np

from whet.network import F32, F64, Network, Tensor, TensorType, evaluate, make_symbol

# : values of symbols in tests
SIZES = {"N": 2, "H": 8, "W": 6, "S": 5}


def feeds(net: Network, seed: int = 0, *, extreme: bool = False, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Arrays for the inputs of `net`: normal values, small integers; `extreme` adds NaN, infinities and signed zeros."""
    env = {**SIZES, **(sizes or {})}
    return {t.name: _array(t.name, t.type, env, seed, extreme) for t in net.inputs}


def _array(name: str, type_: TensorType, env: dict[str, int], seed: int, extreme: bool) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape = tuple(evaluate(d, env) for d in type_.shape)
    if type_.dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if not type_.dtype.is_float:
        return rng.integers(0, 2, shape).astype(type_.dtype.numpy)
    a = rng.standard_normal(shape).astype(type_.dtype.numpy)
    if extreme:
        special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38], np.float64)
        places = rng.permutation(a.size)[: max(1, a.size // 20)]
        with np.errstate(over="ignore"):
            a.reshape(-1)[places] = rng.choice(special, len(places)).astype(a.dtype)
    return a


def same(want: np.ndarray, got: np.ndarray, rtol: float) -> None:
    """Asserts equal type and shape, and values equal to `rtol` of the largest (0: bit-exact). NaN equals NaN."""
    assert want.dtype == got.dtype
    assert want.shape == got.shape
    if want.dtype.kind == "V" or want.dtype.name.startswith("float8"):  # NumPy has no NaN of such types
        want, got = want.astype(np.float32), got.astype(np.float32)
    if rtol == 0 or want.dtype.kind not in "fV":
        np.testing.assert_array_equal(got, want)
        return
    w, g = want.astype(np.float64), got.astype(np.float64)
    rest = np.isfinite(w)
    np.testing.assert_array_equal(g[~rest], w[~rest])
    if rest.any():
        scale, off = float(np.abs(w[rest]).max()), float(np.abs(g[rest] - w[rest]).max())
        assert off <= rtol * max(scale, 1e-30), f"differs by {off} of {scale}"


def random_network(seed: int, steps: int = 14) -> Network:
    """A network of images and matrices with a symbolic batch, like an exporter's, with dead, duplicate and redundant layers.

    Input %x is f32[N,C,8,6]; there are one to three outputs.
    """
    return _Maker(seed).make(steps)


class _Maker:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng([seed, 77])
        self.net = Network(f"random_{seed}")
        self.values: list[Tensor] = []
        self.weights: list[Tensor] = []

    def make(self, steps: int) -> Network:
        n = make_symbol("N")
        self.values.append(self.net.add_input("x", TensorType(F32, (n, int(self.rng.choice([3, 4, 8])), 8, 6))))
        kinds: list[Callable[[Tensor], Tensor | None]] = [
            self.block, self.block, self.block, self.conv, self.batch_norm, self.head, self.gemm, self.activation,
            self.activation, self.residual, self.concat, self.pool,
            self.pad_conv, self.transposes, self.chain, self.gemm, self.scale, self.silu, self.hard_swish, self.gelu, self.layer_norm,
            self.attention, self.useless, self.double, self.dead, self.constants, self.mean, self.split, self.mish, self.slices,
            self.silent, self.shortcut, self.classifier, self.anchors, self.stem, self.gate, self.fork, self.neck, self.expanded,
        ]  # fmt: skip
        while len(self.net.layers) < steps:
            made = self.pick(kinds)(self.values[-1] if self.rng.random() < 0.8 else self.pick(self.values[-5:]))
            if made is not None:
                self.values.append(made)
        outputs = {id(t): t for t in (self.values[-1], *(self.pick(self.values) for _ in range(int(self.rng.integers(0, 3)))))}
        for i, t in enumerate(outputs.values()):
            self.net.mark_output(t, f"y{i}")
        for i, layer in enumerate(self.net.layers):
            layer.sources = (f"node{i}",)
        return self.net

    def pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def weight(self, *shape: int, scale: float = 1.0, positive: bool = False, silent: bool = False) -> Tensor:
        """A constant; sometimes an existing one, or a duplicate under another name. `silent`: with rows of zeros."""
        fitting = [w for w in self.weights if w.shape == shape]
        if fitting and self.rng.random() < 0.3 and not positive:
            chosen = self.pick(fitting)
            return chosen if self.rng.random() < 0.5 else self.net.constant(chosen.array().copy(), "twin")
        a = self.rng.standard_normal(shape) * scale
        if silent:
            a[self.rng.random(shape[0]) < 0.5] = 0
        w = self.net.constant((np.abs(a) + 0.5 if positive else a).astype(np.float32), "w")
        if not positive:
            self.weights.append(w)
        return w

    def number(self, value: float) -> Tensor:
        return self.net.constant(np.array(value, np.float32), "c")

    def ints(self, *values: int) -> Tensor:
        return self.net.constant(np.array(values, np.int64), "i")

    def image(self, x: Tensor) -> bool:
        return x.type.rank == 4 and all(isinstance(d, int) and d > 2 for d in x.shape[2:])

    # layers

    def conv(self, x: Tensor) -> Tensor | None:
        if not self.image(x):
            return None
        c, k = int(x.shape[1]), int(self.rng.choice([1, 3]))
        group = self.pick([1, 1, c])
        out = c if group == c else int(self.rng.choice([4, c, 6]))
        silent = self.rng.random() < 0.25
        inputs = [x, self.weight(out, c // group, k, k, scale=(c // group * k * k) ** -0.5, silent=silent)]
        if not silent and self.rng.random() < 0.5:
            inputs.append(self.weight(out))
        stride = int(self.rng.choice([1, 1, 2]))
        return self.net.add("Conv", *inputs, group=group, pads=(k // 2,) * 4, strides=(stride, stride))

    def block(self, x: Tensor) -> Tensor | None:
        """Convolution, batch norm, sometimes a residual, and an activation."""
        y = self.conv(x)
        if y is None:
            return None
        if self.rng.random() < 0.7:
            y = self.batch_norm(y) or y
        if y.type == x.type and self.rng.random() < 0.6:
            y = self.net.add("Add", y, x)
        y = self.silu(y) if self.rng.random() < 0.4 else self.activation(y)
        return y if self.rng.random() < 0.7 else self.conv(y)

    def silent(self, x: Tensor) -> Tensor | None:
        """Two convolutions, the first with all-zero channels."""
        if not self.image(x):
            return None
        c = int(x.shape[1])
        y = self.net.add("Relu", self.net.add("Conv", x, self.weight(6, c, 1, 1, scale=c**-0.5, silent=True)))
        return self.net.add("Conv", y, self.weight(4, 6, 3, 3, scale=54**-0.5), pads=(1, 1, 1, 1))

    def shortcut(self, x: Tensor) -> Tensor | None:
        """The end of a block with a projection as its shortcut."""
        if not self.image(x):
            return None
        c, out = int(x.shape[1]), int(self.rng.choice([4, 6]))
        y = self.net.add("Relu", self.net.add("Conv", x, self.weight(8, c, 3, 3, scale=(c * 9) ** -0.5), pads=(1, 1, 1, 1)))
        y = self.net.add("Conv", y, self.weight(out, 8, 1, 1, scale=8**-0.5))
        z = self.net.add("Conv", x, self.weight(out, c, 1, 1, scale=c**-0.5))
        return self.net.add("Relu", self.net.add("Add", y, z))

    def stem(self, x: Tensor) -> Tensor | None:
        """A stem, at any position of the network."""
        if not self.image(x):
            return None
        c = int(x.shape[1])
        y = self.net.add("Relu", self.net.add("Conv", x, self.weight(8, c, 3, 3, scale=(c * 9) ** -0.5), pads=(1, 1, 1, 1)))
        return self.net.add("MaxPool", y, kernel_shape=(3, 3), strides=(1, 2), pads=(1, 1, 1, 1))

    def fork(self, x: Tensor) -> Tensor | None:
        """The start of a block with two parallel branches that are concatenated."""
        if not self.image(x):
            return None
        c = int(x.shape[1])
        ways = [self.net.add("Relu", self.net.add("Conv", x, self.weight(out, c, 1, 1, scale=c**-0.5))) for out in (4, 6)]
        return self.net.add("Concat", *ways, axis=1)

    def neck(self, x: Tensor) -> Tensor | None:
        """An image, downsampled, upsampled again and concatenated with the original, and one or two convolutions of the result."""
        if not self.image(x) or any(int(d) % 2 for d in x.shape[2:]):
            return None
        y = self.net.add("MaxPool", x, kernel_shape=(2, 2), strides=(2, 2))
        y = self.net.add("Resize", y, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor", scales=(1.0, 1.0, 2.0, 2.0))
        y = self.net.add("Concat", *((x, y) if self.rng.random() < 0.5 else (y, x)), axis=1)
        return self.fork(y) if self.rng.random() < 0.5 else self.conv(y)

    def gate(self, x: Tensor) -> Tensor | None:
        """Squeeze and excitation: an image times gates from its means through two products."""
        if not self.image(x):
            return None
        c = int(x.shape[1])
        y = self.net.add("Relu", self.net.add("Conv", self.net.add("GlobalAveragePool", x), self.weight(2, c, 1, 1, scale=c**-0.5)))
        return self.net.add("Mul", x, self.net.add("Sigmoid", self.net.add("Conv", y, self.weight(c, 2, 1, 1))))

    def expanded(self, x: Tensor) -> Tensor:
        """A difference from the means over the last axis, which are expanded to the value's shape first, as torch's expand_as is exported."""
        means = self.net.add("ReduceMean", x, self.ints(-1), keepdims=1)
        return self.net.add("Sub", x, self.net.add("Expand", means, self.net.add("Shape", x)))

    def anchors(self, x: Tensor) -> Tensor | None:
        """A detector's head: channels of two anchors, the channels of each anchor moved to the last axis."""
        if not self.image(x) or int(x.shape[1]) % 2:
            return None
        c, h, w = (int(d) for d in x.shape[1:])
        y = self.net.add("Reshape", self.net.add("Conv", x, self.weight(c, c, 1, 1, scale=c**-0.5)), self.ints(0, 2, c // 2, h, w))
        y = self.net.add("Transpose", y, perm=(0, 1, 3, 4, 2))
        if self.rng.random() < 0.5:  # decoded
            parts = [self.net.add("Sigmoid", y), self.ints(1, c // 2 - 1)]
            first, rest = self.net.add_layer("Split", parts, {"axis": 4}).outputs if c > 2 else (y, y)
            y = self.net.add("Concat", self.net.add("Mul", first, self.number(2.0)), rest, axis=4)
        return self.net.add("Reshape", y, self.ints(0, -1))

    def classifier(self, x: Tensor) -> Tensor | None:
        """Means over the image and one linear layer."""
        if x.type.rank != 4:
            return None
        y = self.net.add("Flatten", self.net.add("GlobalAveragePool", x))
        k = int(y.shape[1])
        return self.net.add("Gemm", y, self.weight(5, k, scale=k**-0.5), self.weight(5), transB=1)

    def head(self, x: Tensor) -> Tensor | None:
        """From an image to a matrix, two linear layers with a residual."""
        if x.type.rank != 4:
            return None
        y = self.net.add("Flatten", self.net.add("GlobalAveragePool", x))
        k = int(y.shape[1])
        return self.net.add("Add", self.gemm(self.net.add("Gemm", y, self.weight(k, k, scale=k**-0.5)), k), y)

    def batch_norm(self, x: Tensor) -> Tensor | None:
        if x.type.rank not in (2, 4):
            return None
        c = int(x.shape[1])
        return self.net.add("BatchNormalization", x, self.weight(c), self.weight(c), self.weight(c), self.weight(c, positive=True))

    def activation(self, x: Tensor) -> Tensor:
        op = self.pick(["Relu", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "Elu", "Clip", "Gelu", "Softplus", "PRelu", "Abs", "Neg"])
        if op == "Clip":
            return self.net.add(op, x, self.number(0.0), self.number(6.0))
        if op == "PRelu":
            return self.net.add(op, x, self.pick([self.number(0.2), self.weight(int(x.shape[-1]), scale=0.3)]))
        return self.net.add(op, x)

    def residual(self, x: Tensor) -> Tensor | None:
        others = [t for t in self.values if t.type == x.type]
        op = self.pick(["Add", "Add", "Add", "Mul", "Max", "Sub"])
        return self.net.add(op, *self.rng.permutation(np.array([x, self.pick(others)], object)))

    def concat(self, x: Tensor) -> Tensor:
        others = [t for t in self.values if t.type.rank == x.type.rank and t.shape[2:] == x.shape[2:]]
        if int(x.shape[1]) >= 12:
            return self.net.add("Relu", x)
        y = self.net.add("Concat", x, self.pick(others), axis=1)
        if not self.image(y) or self.rng.random() < 0.5:
            return y
        c = int(y.shape[1])
        return self.net.add("Conv", y, self.weight(c, c, 1, 1, scale=c**-0.5))

    def pool(self, x: Tensor) -> Tensor | None:
        if not self.image(x):
            return None
        if int(x.shape[1]) <= 4 and self.rng.random() < 0.5:  # a detector's pyramid
            near = self.net.add("MaxPool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
            return self.net.add("Concat", x, near, self.net.add("MaxPool", near, kernel_shape=(3, 3), pads=(1, 1, 1, 1)), axis=1)
        op = self.pick(["MaxPool", "AveragePool"])
        more = {"count_include_pad": 1} if op == "AveragePool" and self.rng.random() < 0.5 else {}
        padded = self.net.add("Pad", x, pads=(0, 0, 1, 1, 0, 0, 1, 1)) if self.rng.random() < 0.3 else x
        return self.net.add(op, padded, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), **more)

    def pad_conv(self, x: Tensor) -> Tensor | None:
        if not self.image(x):
            return None
        c, value = int(x.shape[1]), self.pick([0.0, 0.0, 1.0])
        padded = self.net.add("Pad", x, self.ints(0, 0, 1, 0, 0, 0, 1, 2), self.number(value))
        return self.net.add("Conv", padded, self.weight(4, c, 3, 3, scale=(9 * c) ** -0.5))

    def transposes(self, x: Tensor) -> Tensor:
        if self.image(x) and int(x.shape[1]) % 2 == 0 and self.rng.random() < 0.3:  # a detector's head: channels split and moved to the last axis
            cut = self.net.add("Reshape", x, self.ints(0, 2, int(x.shape[1]) // 2, *(int(d) for d in x.shape[2:])))
            return self.net.add("Reshape", self.net.add("Transpose", cut, perm=(0, 1, 3, 4, 2)), self.ints(0, -1))
        perm = [int(p) for p in self.rng.permutation(x.type.rank)]
        back = [perm.index(i) for i in range(x.type.rank)]
        y = self.net.add("Transpose", x, perm=tuple(perm))
        if self.rng.random() < 0.4:
            y = self.net.add("Tanh", y)
        return self.net.add("Transpose", y, perm=tuple(back))

    def chain(self, x: Tensor) -> Tensor:
        """A reshape to a target that is computed from Shape, as exporters of dynamic batches write it."""
        batch = self.net.add("Unsqueeze", self.net.add("Gather", self.net.add("Shape", x), self.net.constant(np.array(0), "at")), self.ints(0))
        total = int(np.prod([int(d) for d in x.shape[1:]]))
        if x.type.rank == 2:
            return self.net.add("Reshape", x, self.net.add("Concat", batch, self.ints(total), axis=0))
        flat = self.net.add("Reshape", x, self.net.add("Concat", batch, self.ints(-1), axis=0))
        if self.rng.random() < 0.5:
            return flat
        return self.net.add("Reshape", flat, self.net.add("Concat", batch, self.ints(*(int(d) for d in x.shape[1:])), axis=0))

    def gemm(self, x: Tensor, out: int = 5) -> Tensor:
        if x.type.rank != 2:
            k = int(x.shape[-1])
            y = self.net.add("MatMul", x, self.weight(k, 6, scale=k**-0.5))
            return self.net.add("Add", self.weight(6), y) if self.rng.random() < 0.7 else y
        k = int(x.shape[1])
        if self.rng.random() < 0.3:
            return self.net.add("Add", self.net.add("MatMul", x, self.weight(k, out, scale=k**-0.5)), self.weight(out))
        w, b = self.weight(out, k, scale=k**-0.5), self.pick([self.weight(out), self.weight(1, out)])
        return self.net.add("Gemm", x, w, b, transB=1, alpha=self.pick([1.0, 0.5]), beta=self.pick([1.0, 2.0]))

    def scale(self, x: Tensor) -> Tensor:
        channel = self.weight(int(x.shape[1]), *(1,) * (x.type.rank - 2), positive=True) if x.type.rank > 1 else self.number(0.5)
        op, other = self.pick(["Mul", "Add", "Div", "Sub"]), self.pick([self.number(0.5), self.number(1.0), channel])
        return self.net.add(op, x, other)

    def silu(self, x: Tensor) -> Tensor:
        y = self.net.add("Sigmoid", x)
        return self.net.add("Mul", *((x, y) if self.rng.random() < 0.5 else (y, x)))

    def hard_swish(self, x: Tensor) -> Tensor:
        six = self.number(6.0)
        gate = self.net.add("Clip", self.net.add("Add", x, self.number(3.0)), self.number(0.0), six)
        return self.net.add("Div", self.net.add("Mul", x, gate), six) if self.rng.random() < 0.7 else self.net.add("Div", gate, six)

    def mish(self, x: Tensor) -> Tensor:
        return self.net.add("Mul", x, self.net.add("Tanh", self.net.add("Softplus", x)))

    def gelu(self, x: Tensor) -> Tensor:
        e = self.net.add("Erf", self.net.add("Div", x, self.number(2**0.5)))
        y = self.net.add("Mul", x, self.net.add("Add", e, self.number(1.0)))
        return self.net.add("Mul", y, self.number(self.pick([0.5, 0.5, 0.25])))

    def layer_norm(self, x: Tensor) -> Tensor:
        axis = self.pick([-1, -1, 1])
        d = self.net.add("Sub", x, self.net.add("ReduceMean", x, self.ints(axis)))
        v = self.net.add("ReduceMean", self.net.add("Pow", d, self.number(2.0)), self.ints(axis))
        y = self.net.add("Div", d, self.net.add("Sqrt", self.net.add("Add", v, self.number(0.01))))
        if axis == 1:
            return y
        k = int(x.shape[-1])
        return self.net.add("Add", self.net.add("Mul", y, self.weight(k)), self.weight(k))

    def attention(self, x: Tensor) -> Tensor | None:
        if x.type.rank != 4 or not all(isinstance(d, int) for d in x.shape[1:]):
            return None
        root = self.number(int(x.shape[-1]) ** -0.25)
        if self.rng.random() < 0.3:  # projections of one value
            n = int(x.shape[-1])
            q, k, v = (self.net.add("Add", self.net.add("MatMul", x, self.weight(n, n)), self.weight(n)) for _ in range(3))
            scores = self.net.add("MatMul", q, self.net.add("Transpose", k, perm=(0, 1, 3, 2)))
            return self.net.add("MatMul", self.net.add("Softmax", scores, axis=-1), v)
        q = self.net.add("Mul", x, root) if self.rng.random() < 0.5 else x
        k = self.net.add("Transpose", x, perm=(0, 1, 3, 2))
        scores = self.net.add("MatMul", q, self.net.add("Mul", k, root))
        return self.net.add("MatMul", self.net.add("Softmax", scores, axis=-1), x)

    def useless(self, x: Tensor) -> Tensor:
        op = self.pick(["Identity", "Dropout", "Cast", "Mul", "Concat", "Slice"])
        match op:
            case "Cast":
                return self.net.add("Cast", x, to=F32)
            case "Mul":
                return self.net.add("Mul", x, self.number(1.0))
            case "Concat":
                return self.net.add("Concat", x, axis=0)
            case "Slice":
                return self.net.add("Slice", x, self.ints(0), self.ints(2**31 - 1), self.ints(1))
        return self.net.add(op, x)

    def slices(self, x: Tensor) -> Tensor | None:
        """Every second row, every second column."""
        if not self.image(x):
            return None
        y = self.net.add("Slice", x, self.ints(0), self.ints(2**63 - 1), self.ints(2), self.ints(2))
        return self.net.add("Slice", y, self.ints(0), self.ints(-1), self.ints(self.pick([-1, 2])))

    def double(self, x: Tensor) -> Tensor | None:
        """A duplicate of an existing layer."""
        layers = [y for y in self.net.layers if len(y.outputs) == 1 and y.output.type.dtype == F32 and y.output in self.values]
        if not layers:
            return None
        layer = self.pick(layers)
        return self.net.add(layer.op, *layer.inputs, **layer.attrs)

    def dead(self, x: Tensor) -> None:
        self.net.add("Relu", self.net.add("Exp", x))

    def constants(self, x: Tensor) -> Tensor:
        a = self.net.add("Transpose", self.weight(int(x.shape[-1]), 1), perm=(1, 0))
        return self.net.add("Add", x, self.net.add("Cast", self.net.add("Cast", a, to=F64), to=F32))

    def mean(self, x: Tensor) -> Tensor | None:
        if not self.image(x):
            return None
        return self.net.add("ReduceMean", x, self.ints(2, 3), keepdims=self.pick([0, 1]))

    def split(self, x: Tensor) -> Tensor | None:
        if int(x.shape[1]) % 2:
            return None
        a, b = self.net.add("Split", x, axis=1, num_outputs=2)
        self.values.append(a)
        return b


def describe(net: Network) -> str:
    """The layers in order, and the number of elements of all tensors, with 2 for each symbol."""
    symbols = dict.fromkeys(set().union(*(t.type.symbols() for t in net.tensors())), 2)
    sizes = sum(int(np.prod([evaluate(d, symbols) for d in t.shape])) for t in net.tensors())
    ops = [f"{op}{f' x{n}' if n > 1 else ''}" for op, n in ((op, len(list(run))) for op, run in groupby(x.op for x in net.layers))]
    return f"{', '.join(ops)} ({sizes})"
