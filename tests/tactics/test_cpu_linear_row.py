"""Products of one to three rows, in f32 and bf16: strips of all lengths, epilogues, convolutions of a pixel, several threads."""

import numpy as np
import pytest
from test_cpu_direct_conv import text
from test_cpu_indirect import layer_of
from test_cpu_small_floats import product_with
from test_onednn_tactics import compute

from whet.backends.cpu import CpuBackend
from whet.ops import run_layer, run_regions
from whet.tactics import get_tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu.linear import _row_kernel
from whet.tactics.cpu.linear._row_kernel import RowKernel, pack_strips

NAMES = ("cpu/linear_row", "cpu/linear_row_bf16")
pytestmark = pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))


@pytest.fixture(autouse=True)
def small_layers_on_all_threads(monkeypatch):
    monkeypatch.setattr(RowKernel, "serial_work", 0)


def check(name, layer, arrays, monkeypatch):
    """Within the stated error of float64 of the operands as they are stored, on one and three threads, with short and long strips."""
    tactic = get_tactic(name)
    if reason := tactic.unavailable():
        pytest.skip(reason)
    assert tactic.why_not(layer) is None
    for threads, many in ((1, 32), (3, 32), (3, 0)):
        machine = CpuBackend(threads=threads)
        monkeypatch.setattr("test_onednn_tactics.CPU", machine)
        monkeypatch.setattr(_row_kernel, "MANY_STRIPS", many)
        (signature,) = tactic.signatures(layer, machine)
        assert tactic.refuses(layer, signature, machine) is None
        kernel, (got,), fed = compute(layer, arrays, tactic, signature, ())
        wide = [a.astype(np.float64) for a in fed]
        (want,) = run_regions(layer, wide) if layer.regions else run_layer(layer, wide)
        assert np.abs(got - want).max() <= kernel.rtol / 2 * np.abs(want).max(), (threads, many)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "inner", "results"), [
    ((1,), 64, 32), ((1,), 10, 1), ((1,), 6, 17), ((2,), 2, 33), ((3,), 34, 100), ((1, 1), 768, 1000), ((1, 3), 50, 16), ((2,), 128, 2100),
])  # fmt: skip
def test_products(name, rows, inner, results, monkeypatch):
    check(name, *layer_of("MatMul", [text(*rows, inner), f"const {text(inner, results)}"]), monkeypatch)
    if len(rows) == 1:
        inputs = [text(*rows, inner), f"const {text(results, inner)}", f"const {text(results)}"]
        check(name, *layer_of("Gemm", inputs, transB=1), monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [("bias",), ("bias", "Gelu"), ("bias", "residual"), ("residual",), ("bias", "residual", "Relu")])
def test_epilogues(name, steps, monkeypatch):
    check(name, *product_with(steps, 2, 64, 72), monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_of_a_pixel(name, monkeypatch):
    for samples in (1, 3):
        check(name, *layer_of("Conv", [text(samples, 48, 1, 1), f"const {text(40, 48, 1, 1)}", f"const {text(40)}"]), monkeypatch)


def test_f32_takes_an_odd_number_of_inputs(monkeypatch):
    layer, arrays = layer_of("MatMul", [text(1, 37), f"const {text(37, 20)}"])
    check("cpu/linear_row", layer, arrays, monkeypatch)
    assert "even number of inputs" in get_tactic("cpu/linear_row_bf16").why_not(layer)


def test_other_layers_are_refused():
    def reason(op, inputs, **attrs):
        return get_tactic("cpu/linear_row").why_not(layer_of(op, inputs, **attrs)[0])

    assert "1 to 3 rows" in reason("MatMul", [text(4, 8), f"const {text(8, 4)}"])
    assert "one pixel" in reason("Conv", [text(1, 4, 2, 2), f"const {text(4, 4, 1, 1)}"])
    assert "one pixel" in reason("Conv", [text(1, 4, 1, 1), f"const {text(4, 2, 1, 1)}"], group=2)
    assert "run time" in reason("Conv", [text(1, 4, 1, 1), text(4, 4, 1, 1)])


def test_strips():
    """Whole strips, then one with the vectors that it needs; bf16 has the pairs of a result next to each other."""
    matrix = np.arange(4 * 37, dtype=np.float32).reshape(4, 37)
    strips = pack_strips(matrix, 32, 4, False)
    np.testing.assert_array_equal(strips[: 4 * 32].reshape(4, 32), matrix[:, :32])
    np.testing.assert_array_equal(strips[4 * 32 :].reshape(4, 8), np.pad(matrix[:, 32:], ((0, 0), (0, 3))))
    pairs = pack_strips(matrix, 16, 16, True).astype(np.float32)
    np.testing.assert_array_equal(pairs[: 2 * 16 * 2].reshape(2, 16, 2)[1, 5], matrix[2:, 5])
