"""Random networks of moves around linear layers: Transposes, Reshapes, rolls, partitions, residuals. Passes keep their results."""

from math import prod

import numpy as np
import pytest
from random_networks import feeds, same

from support.selection import with_long_variants
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.passes import lower

MOVES = {
    "gather_moves", "gemm_to_matmul", "sink_transposes", "split_before_transposes", "split_transposes", "transpose_images", "transpose_to_reshape",
}  # fmt: skip


class Maker:
    """A network of static shapes, grown at its last values."""

    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)
        self.net = Network("moves")

    def constant(self, *shape):
        return self.net.constant(self.rng.standard_normal(shape).astype(np.float32), f"w{len(self.net.constants)}")

    def transpose(self, x):
        rank = x.type.rank
        perm = list(range(rank - 1)) if self.rng.rand() < 0.6 else list(range(rank))
        self.rng.shuffle(perm)
        return self.net.add("Transpose", x, perm=(*perm, rank - 1) if len(perm) < rank else tuple(perm))

    def reshape(self, x):
        shape = list(x.shape)
        if len(shape) > 2 and self.rng.rand() < 0.5:
            i = self.rng.randint(len(shape) - 1)
            shape[i : i + 2] = [shape[i] * shape[i + 1]]
        else:
            i = self.rng.randint(len(shape))
            d = next((d for d in (2, 3) if shape[i] % d == 0), 1)
            shape[i : i + 1] = [shape[i] // d, d] if self.rng.rand() < 0.5 else [d, shape[i] // d]
        return self.net.add("Reshape", x, shape=tuple(shape)) if len(shape) <= 6 else x

    def linear(self, x):
        n = int(self.rng.choice([8, 16]))
        y = self.net.add("MatMul", x, self.constant(x.shape[-1], n))
        return self.net.add("Add", y, self.constant(n)) if self.rng.rand() < 0.7 else y

    def gemm(self, x):
        rows = self.net.add("Reshape", x, shape=(prod(x.shape[:-1]), x.shape[-1]))
        y = self.net.add("Gemm", rows, self.constant(8, x.shape[-1]), self.constant(8), transB=1)
        return self.net.add("Reshape", y, shape=(*x.shape[:-1], 8))

    def factor(self, x):
        axis = self.rng.randint(x.type.rank)
        return self.net.add("Mul", x, self.constant(*(d if i == axis else 1 for i, d in enumerate(x.shape) if i >= axis)))

    def residual(self, x):
        """Through a Transpose, a linear layer and back; or the sum of two Transposes."""
        perm = tuple(int(i) for i in self.rng.permutation(x.type.rank))
        turned = self.net.add("Transpose", x, perm=perm)
        y = self.net.add("MatMul", turned, self.constant(turned.shape[-1], turned.shape[-1]))
        back = self.net.add("Transpose", y, perm=tuple(int(i) for i in np.argsort(perm)))
        return self.net.add("Add", *((x, back) if self.rng.rand() < 0.5 else (back, x)))

    def flatten(self, x):
        """The last axis first, pixels merged, and turned."""
        x = x if x.type.rank == 4 else self.net.add("Reshape", x, shape=(1, x.shape[0], 1, prod(x.shape[1:])))
        flat = self.net.add("Reshape", x, shape=(*x.shape[:2], x.shape[2] * x.shape[3]))
        return self.net.add("Transpose", flat, perm=(0, 2, 1))

    def parts(self, x):
        """The first axes exchanged, the last axis split, and the parts in front: queries, keys and values of torch's attention."""
        if x.type.rank < 3 or x.type.rank > 5 or x.shape[-1] % 2:
            return x
        rest = tuple(range(2, x.type.rank))
        turned = self.net.add("Transpose", x, perm=(1, 0, *rest))
        split = self.net.add("Reshape", turned, shape=(*turned.shape[:-1], 2, x.shape[-1] // 2))
        return self.net.add("Transpose", split, perm=(x.type.rank - 1, *range(x.type.rank - 1), x.type.rank))

    def roll(self, x):
        axis = self.rng.randint(x.type.rank)
        if x.shape[axis] < 2:
            return x
        by = self.rng.randint(1, x.shape[axis])
        parts = [self.net.add("Slice", x, starts=(a,), ends=(b,), axes=(axis,)) for a, b in ((by, x.shape[axis]), (0, by))]
        return self.net.add("Concat", *parts, axis=axis)

    def make(self, steps=9):
        shape = [(2, 6, 4, 8), (1, 4, 4, 8), (3, 1, 8), (2, 3, 5, 16)][self.rng.randint(4)]
        x = self.net.add_input("x", parse_type(f"f32[{','.join(map(str, shape))}]"))
        for _ in range(steps):
            kinds = [self.transpose, self.reshape, self.linear, self.gemm, self.factor, self.residual, self.roll, self.flatten, self.parts]
            x = kinds[self.rng.randint(len(kinds))](x)
            if self.rng.rand() < 0.15:
                self.net.mark_output(self.net.add("Relu", x))  # a value that is read elsewhere too
        self.net.mark_output(self.net.add("Relu", x))
        return self.net


@pytest.mark.parametrize("seed", with_long_variants(range(150)))
def test_random_moves_keep_their_results(seed):
    net = Maker(seed).make()
    arrays = feeds(net, seed=seed)
    want = run_network(net, arrays, widen=True)
    low, _ = lower(net, check=True)
    got = run_network(low, arrays, widen=True)
    for a, b in zip(want.values(), got.values(), strict=True):
        same(a, b, 1e-5)


def test_every_pass_for_moves_fires():
    fired = set()
    for seed in range(150):
        fired |= {name for name, n in lower(Maker(seed).make())[1].counts().items() if n}
    assert fired >= MOVES
