"""The GPU's reference products: equal to NumPy's, checked by it on some results, used by verification, and no way past it for wrong kernels.

Without a GPU the kernels run as C++ on the host.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from planted_networks import MIN, OPERATIONS, network

from support.host_cuda import host_compiler
from support.host_products import HostProducts
from support.planted_cuda import FAULTS, HostGpu, compile_faults, plant_on_host
from support.standin_gpu import StandInGpu
from whet.backends import BACKENDS, get_backend
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.products import emit_products_source
from whet.builder import BuildConfig, build
from whet.builder.progress import ProgressLog
from whet.builder.verify import device_products
from whet.builder.verify.device_products import CheckedProducts, find_device_products
from whet.builder.verify.verification import verify_engine
from whet.errors import BackendError
from whet.network import F64, Network, TensorType
from whet.ops import run_layer
from whet.ops._products import native_accumulators, products_by

needs_compiler = pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
FAULTY = [  # (part of the kernels' text, a fault)
    ("p.y[i] = total.whole + total.part;\n}\n\n//", "p.y[i] = (total.whole + total.part) * (column == columns - 1 ? 1.01 : 1);\n}\n\n//"),
    ("for (long long k = 0; k < terms; ++k)", "for (long long k = 1; k < terms; ++k)"),
    ("p.at[matrices + matrix] * terms", "p.at[matrix] * terms"),
]  # fmt: skip
FAULTY_CONVOLUTION = [
    ("for (int c = 0; c < ins; ++c)", "for (int c = 0; c < ins - 1; ++c)"),
    ("at < size[2])", "at < size[2] - 1)"),
    ("k % outs :", "(k + 1) % outs :"),
    ("return place < 0 || place % stride ? -1", "return place < 0 ? -1"),
    ("return result * stride - pad + moved", "return result * stride - pad + tap"),
]


def make_layer(op, x, w, **attrs):
    net = Network("one")
    return net.add_layer(op, [net.add_input("x", TensorType(F64, x.shape)), net.add_input("w", TensorType(F64, w.shape))], attrs)


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


def compare(layer, arrays, products):
    """Both types of operands and all accumulators, with NumPy and with `products`."""
    for dtype, native in ((np.float64, False), (np.float32, False), (np.float32, True)):
        ins = [a.astype(dtype) for a in arrays]
        with native_accumulators() if native else products_by(None):
            (want,) = run_layer(layer, ins)
            with products_by(products):
                (got,) = run_layer(layer, ins)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        rtol = 1e-13 if dtype == np.float64 else 1e-5 if native else 1e-7
        np.testing.assert_allclose(got, want, rtol=0, atol=rtol * np.abs(want).max() * 4)


#: sizes, taps, strides, dilations and pads of three axes, of which convolutions use the first ones
WINDOWS = (
    ((9, 7, 8), (3, 2, 1), (1, 2, 3), (2, 1, 1), (1, 0, 2, 2, 1, 0)),
    ((5, 6, 4), (2, 3, 3), (2, 1, 2), (1, 2, 1), (0, 2, 1, 1, 1, 2)),
)


def check_all_products(backend):
    """Convolutions of one to three axes, groups, dilations, pads, transposed ones, and batched products; returns their number."""
    rng, products = np.random.default_rng(0), CheckedProducts(backend, 0, pytest.fail, least=0)
    for rank, window in itertools.product((1, 2, 3), WINDOWS):
        sizes, kernel, strides, dilations = (v[:rank] for v in window[:4])
        pads = (*window[4][:rank], *window[4][3 : 3 + rank])
        for group in (1, 3, 6):
            attrs = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
            x = draw(rng, 2, 6, *sizes)
            w = draw(rng, 6 if group == 6 else 9, 6 // group, *kernel)
            compare(make_layer("Conv", x, w, **attrs), [x, w], products)
            w = draw(rng, 6, 2, *kernel)
            extra = {"output_padding": tuple(int(s > 1) for s in strides)}
            compare(make_layer("ConvTranspose", x, w, **attrs, **extra), [x, w], products)
    for a, b in (((5, 700), (700, 6)), ((2, 1, 5, 8), (3, 8, 7)), ((3, 4, 5), (5, 6)), ((4, 5), (2, 5, 3))):
        x, w = draw(rng, *a), draw(rng, *b)
        compare(make_layer("MatMul", x, w), [x, w], products)
    x, w = draw(rng, 7, 300), draw(rng, 9, 7)
    compare(make_layer("Gemm", x, w, transA=1, transB=1, alpha=0.5), [x, w], products)
    assert not products.wrong
    assert not products.declined
    return products.computed


@needs_compiler
def test_the_kernels_compute_what_numpy_computes():
    assert check_all_products(HostProducts()) == 3 * (2 * 6 * 3 + 5)


@needs_compiler
def test_infinities_and_padding_are_multiplied_as_by_numpy():
    rng, products = np.random.default_rng(1), CheckedProducts(HostProducts(), 0, pytest.fail, least=0)
    x, w = draw(rng, 1, 2, 5, 5), draw(rng, 3, 2, 3, 3)
    w[1, 0, 0, 0], x[0, 1, 2, 2] = np.inf, np.nan
    layer = make_layer("Conv", x, w, pads=(1, 1, 1, 1))
    (want,) = run_layer(layer, [x, w])
    with products_by(products):
        (got,) = run_layer(layer, [x, w])
    assert np.isnan(want).any()
    assert np.isinf(want).any()
    np.testing.assert_allclose(got, want, rtol=1e-12)


def multiply_some(products, seed=0):
    rng = np.random.default_rng(seed)
    a, b = draw(rng, 12, 40), draw(rng, 2, 40, 50)  # both products of the batch read the same a
    return products.multiply(a, b, np.dtype(np.float64)), a @ b


def convolve_some(products, **attrs):
    rng = np.random.default_rng(3)
    transposed = attrs.pop("transposed", False)
    x, w = draw(rng, 2, 6, 9, 8), draw(rng, 6, 3, 3, 3) if transposed else draw(rng, 6, 6, 3, 3)
    layer = make_layer("ConvTranspose" if transposed else "Conv", x, w, **attrs)
    with products_by(products):
        return run_layer(layer, [x, w])[0], run_layer(layer, [x, w])[0]


@needs_compiler
@pytest.mark.parametrize(("old", "new"), FAULTY, ids=[old for old, _ in FAULTY])
def test_a_fault_in_the_product_kernel_is_found(old, new):
    notes = []
    products = CheckedProducts(HostProducts(old, new), 0, notes.append, least=0)
    got, _ = multiply_some(products)
    assert got is None
    assert products.computed == 0
    assert "differ from NumPy's" in products.wrong
    assert len(notes) == 1
    assert products.wrong in notes[0]
    assert multiply_some(CheckedProducts(HostProducts(), 0, pytest.fail, least=0))[0] is not None


@needs_compiler
@pytest.mark.parametrize(("old", "new"), FAULTY_CONVOLUTION, ids=[old for old, _ in FAULTY_CONVOLUTION])
def test_a_fault_in_the_convolution_kernel_is_found(old, new):
    notes = []
    products = CheckedProducts(HostProducts(old, new), 0, notes.append, least=0)
    convolve_some(products, dilations=(2, 2), strides=(2, 2))
    convolve_some(products, strides=(2, 2), transposed=True)
    assert len(notes) == 1
    assert "differ from NumPy's" in products.wrong
    for attrs in ({"dilations": (2, 2), "strides": (2, 2)}, {"strides": (2, 2), "transposed": True}):
        got, again = convolve_some(products, **attrs)  # by NumPy from now on
        want, _ = convolve_some(None, **attrs)
        assert np.array_equal(got, want)
        assert np.array_equal(again, want)


class Doubtful:
    """Products that are wrong in one result."""

    def __init__(self, at):
        self.at = at

    def multiply(self, a, b, dtype):
        y = np.matmul(a, b).astype(dtype)
        y.reshape(-1)[self.at] *= 1.001
        return y


def test_one_wrong_result_is_found_as_often_as_it_is_drawn():
    """128 of 1,200 results are drawn for each call: a single wrong one is missed with a probability of (1 - 1/1200)^128 = 0.9."""
    calls = [CheckedProducts(Doubtful(500), seed, lambda note: None, least=0) for seed in range(100)]
    found = sum(multiply_some(p)[0] is None for p in calls)
    assert 2 <= found <= 25
    for edge in (0, -1):  # always compared
        assert multiply_some(CheckedProducts(Doubtful(edge), 0, lambda note: None, least=0))[0] is None


def test_too_little_memory_leaves_the_products_to_numpy():
    class Full:
        def multiply(self, a, b, dtype):
            raise BackendError("0 of 80 GiB are free")

    products = CheckedProducts(Full(), 0, pytest.fail, least=0)
    assert multiply_some(products)[0] is None
    assert (products.declined, products.wrong) == (1, "")


def test_small_products_and_vectors_are_left_to_numpy():
    products = CheckedProducts(HostProducts(), 0, pytest.fail)
    assert multiply_some(products)[0] is None
    everything = CheckedProducts(HostProducts(), 0, pytest.fail, least=0)
    assert everything.multiply(np.ones(4), np.ones((4, 3)), np.dtype(np.float64)) is None
    assert everything.multiply(np.ones((2, 4), np.int64), np.ones((4, 3), np.int64), np.dtype(np.int64)) is None


class WithProducts(HostGpu):
    """The GPU whose launches run on the host, with the reference kernels there, too."""

    capabilities = dataclasses.replace(StandInGpu.capabilities, reference_products=True, overlapping_launches=True)
    edit = ("", "")
    calls = 0

    def multiply(self, *args):
        WithProducts.calls += 1
        return HostProducts(*self.edit).multiply(*args)

    def convolve(self, *args):
        WithProducts.calls += 1
        return HostProducts(*self.edit).convolve(*args)


def test_only_long_verifications_use_the_gpu(monkeypatch):
    net, notes = network("conv3x3"), []
    shapes = {"x": (4, 8, 6, 6)}
    assert find_device_products(WithProducts(), net, shapes, 1.0, 0, notes.append) is None
    monkeypatch.setattr(device_products, "LEAST_IN_ALL", 1e4)
    assert find_device_products(WithProducts(), net, shapes, 1.0, 0, notes.append) is not None
    assert find_device_products(WithProducts(), net, shapes, 1e-3, 0, notes.append) is None
    assert find_device_products(StandInGpu(), net, shapes, 1.0, 0, notes.append) is None
    assert find_device_products(get_backend("cpu"), net, shapes, 1.0, 0, notes.append) is None


@pytest.fixture(scope="module")
def run_launches():
    if host_compiler() is None:
        pytest.skip("no C++ compiler")
    return compile_faults({op: (1, 1) for op in OPERATIONS})


@pytest.fixture
def always_on_the_gpu(monkeypatch):
    monkeypatch.setattr(device_products, "LEAST", 0)
    monkeypatch.setattr(device_products, "LEAST_IN_ALL", 0)
    monkeypatch.setattr(WithProducts, "calls", 0)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", [0, FAULTS.index("last channel"), FAULTS.index("ignores the bias")])
def test_wrong_kernels_are_found_with_references_on_the_gpu(operation, fault, run_launches, always_on_the_gpu, monkeypatch):
    plant_on_host(monkeypatch, fault, 1, run_launches)
    monkeypatch.setitem(BACKENDS, "cuda", WithProducts)
    checked = verify(operation)
    assert WithProducts.calls >= 3
    assert bool(checked.failures) == bool(fault)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_wrong_reference_is_replaced_and_hides_nothing(operation, run_launches, always_on_the_gpu, monkeypatch):
    """The same fault, a missing first product, in the reference: NumPy computes it, and the correct kernel passes."""
    plant_on_host(monkeypatch, 0, 1, run_launches)
    monkeypatch.setitem(BACKENDS, "cuda", WithProducts)
    monkeypatch.setattr(WithProducts, "edit", ("part += (SUM)a * (SUM)b;", "part += terms ? (SUM)0 : (SUM)a * (SUM)b + (SUM)1;"))
    log = ProgressLog(None)
    assert verify(operation, log).failures == []
    assert any("computed by NumPy" in note for note in log.notes)


def verify(operation, log=None):
    net = network(operation)
    shape = (MIN + 1, 8) if operation == "gemm" else (MIN + 1, 8, 6, 6)
    config = BuildConfig(
        backend="cuda", timing_cache="", optimization_level=0, samples="together", passes=("none",), verify=False, profiles=(({"x": shape},) * 3,)
    )
    return verify_engine(build(net, config), net, get_backend("cuda"), None, config, log or ProgressLog(None))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_the_kernels_compile(arch):
    for types in ((np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)):
        assert compile_cubin(emit_products_source(*(np.dtype(t) for t in types)), name="products.cu", arch=arch)


@pytest.mark.gpu
def test_the_kernels_compute_on_the_gpu_what_numpy_computes(gpu):
    assert check_all_products(gpu) == 3 * (2 * 6 * 3 + 5)


@pytest.mark.gpu
def test_large_products_run_on_the_gpu_from_several_threads(gpu):
    from concurrent.futures import ThreadPoolExecutor

    rng, products = np.random.default_rng(5), CheckedProducts(gpu, 0, pytest.fail)
    a, b = draw(rng, 3, 512, 768), draw(rng, 768, 1024)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: products.multiply(a, b, np.dtype(np.float64)), range(8)))
    assert all(r is not None and np.allclose(r, a @ b, rtol=0, atol=1e-9) for r in results)
    assert products.computed == 8


