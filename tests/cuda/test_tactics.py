"""The contract of CUDA tactics: on any machine their listings and packing, on a GPU every sample against the op's reference."""

import functools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from support.compiling import first_configs
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.builder.verify.differences import compute_float8_error
from whet.network import F8E4M3, compute_stored_shape, from_stored, static_shape, to_stored
from whet.ops import OPS, run_layer, run_regions
from whet.ops import sample_layer as layer_of
from whet.tactics import Args, list_tactics

HOPPER = CompileOnlyGpu()
# the host tactic is the reference itself; cuDNN's and cuSPARSELt's offers are tested on the GPU (test_library_*.py)
TACTICS = [t for t in list_tactics("cuda") if t.name != "cuda/host_reference" and "cudnn" not in t.name and "cusparselt" not in t.name]
SAMPLES = [(op, i) for op in sorted(OPS) for i in range(len(OPS[op].samples))]
SMALLEST = {"f16": 2.0**-14}  # below, the type has fewer digits
MOST = 6  # configurations of a signature that are run


@functools.cache
def made_once(op, i):
    return layer_of(op, OPS[op].samples[i])


def sample_layer(op, i):
    """The layer of a sample, which tests share, and its arrays."""
    _, layer, arrays = made_once(op, i)
    return layer, [a if a is None else a.copy() for a in arrays]


def planned(layer, machine, most=MOST):
    """(tactic, signature, config, kernel) of all offers of the tactics for a layer; at most `most` configurations per signature."""
    listed = [(t, s, first_configs(t, layer, s, machine, most))
              for t in TACTICS if not t.why_not(layer) for s in t.signatures(layer, machine) if not t.refuses(layer, s, machine)]  # fmt: skip
    for t, signature, configs in listed:
        for config in configs:
            yield t, signature, config, t.plan(layer, signature, config, machine)


OFFERED: dict = {}  # sample -> names of the tactics that offer a kernel for it, as far as tests have planned them; the kernels are not kept


def planned_on_hopper(op, i):
    """As `planned`, one kernel at a time: their packed weights take memory."""
    OFFERED.pop((op, i), None)
    names = set()
    for t, signature, config, kernel in planned(sample_layer(op, i)[0], HOPPER):
        names.add(t.name)
        yield t, signature, config, kernel
    OFFERED[op, i] = names


@pytest.fixture(scope="module", autouse=True)
def _free_samples():
    yield
    made_once.cache_clear()


@pytest.mark.parametrize(("op", "i"), SAMPLES)
def test_plans_give_exact_sizes(op, i):
    layer, _ = sample_layer(op, i)
    for _, signature, _, kernel in planned_on_hopper(op, i):
        assert len(kernel.inputs) == len(layer.inputs)
        for t, o, n in zip(layer.outputs, signature.outputs, kernel.outputs, strict=True):
            assert n == np.prod(compute_stored_shape(o.format, static_shape(t.shape)), dtype=int) * o.dtype.numpy.itemsize
        for p in kernel.packed:
            made = p.make()
            assert (made.nbytes, made.dtype) == (p.nbytes, np.uint8)
        assert kernel.rtol < 0.03


def test_every_tactic_takes_some_sample():
    for op, i in SAMPLES:
        if (op, i) not in OFFERED:
            deque(planned_on_hopper(op, i), maxlen=0)
    taken = set().union(*OFFERED.values())
    # reformats have no samples; some tactics are for older GPUs
    assert {t.name for t in TACTICS} - taken <= {"cuda/reformat", "cuda/cublaslt_older", "cuda/sparse_mma_conv", "cuda/sparse_mma_gemm"}


def test_the_convolution_without_tensor_cores_is_refused():
    layer, _ = sample_layer("Conv", 1)
    old = CompileOnlyGpu("sm_80")
    conv = next(t for t in TACTICS if t.name == "cuda/conv")
    signature = conv.signatures(layer, old)[0]
    assert "Hopper" in conv.refuses(layer, signature, old)


# On a GPU


def reference(layer, arrays):
    with np.errstate(all="ignore"):
        return run_regions(layer, arrays) if layer.regions else run_layer(layer, arrays)


#: constants with several axes that kernels do not round to 16 bits: biases and peepholes of each direction
KEPT_IN_F32 = {"LSTM": (3, 7), "GRU": (3,), "RNN": (3,)}


def compute(gpu, layer, arrays, signature, kernel):
    """Outputs as logical arrays, and the inputs rounded to their storage types."""
    buffers, fed = [], []
    exact = {id(layer.input(i)) for i in KEPT_IN_F32.get(layer.op, ())}
    narrow = next((o.dtype for o in (*signature.inputs, *signature.outputs) if o is not None and o.dtype.bits == 16), None)
    for t, o, a in zip(layer.inputs, signature.inputs, arrays, strict=True):
        if t is None or o is None:
            wide = a is not None and t.dtype.is_float and np.squeeze(a).ndim > 1 and narrow is not None and id(t) not in exact
            fed.append(a.astype(narrow.numpy).astype(a.dtype) if wide else a)
            buffers.append(None)
            continue
        stored = to_stored(a.astype(o.dtype.numpy), o.format)
        buffers.append(gpu.allocate(max(stored.nbytes, 1)))
        gpu.write(buffers[-1], 0, stored.reshape(-1).view(np.uint8))
        fed.append(a.astype(o.dtype.numpy).astype(a.dtype))
    outputs = []
    for n in kernel.outputs:
        outputs.append(gpu.allocate(max(n, 1)))
        gpu.write(outputs[-1], 0, np.full(n, 0xFF, np.uint8))  # NaN: elements that are not written become visible
    for i, o in signature.inplace:
        outputs[o] = buffers[i]
    packed = []
    for p in kernel.packed:
        packed.append(gpu.allocate(p.nbytes))
        gpu.write(packed[-1], 0, p.make())
    scratch = gpu.allocate(max(kernel.scratch, 1))
    stream = gpu.stream()
    kernel.enqueue(
        Args(
            tuple(0 if b is None else b.address for b in buffers),
            tuple(b.address for b in outputs),
            tuple(p.address for p in packed),
            scratch.address if kernel.scratch else 0,
        ),
        stream,
    )
    stream.finish().run()
    got = []
    for t, o, b, n in zip(layer.outputs, signature.outputs, outputs, kernel.outputs, strict=True):
        shape = static_shape(t.shape)
        stored = gpu.read(b, 0, n).view(o.dtype.numpy).reshape(compute_stored_shape(o.format, shape))
        got.append(np.array(from_stored(stored, o.format, shape)).astype(t.dtype.numpy))
    return got, fed


def slope(layer):
    """The maximal slope of an activation with bounded results; 0 for other operations."""
    return {"Clip": 1.0, "HardSigmoid": layer.attrs.get("alpha", 0.2), "Sigmoid": 0.25, "Tanh": 1.0}.get(layer.op, 0.0)


def reach(layer, arrays):
    """Largest magnitude of the accumulators that a bounded activation receives at the end of a fused layer, times its slope; 0 for other layers.

    A kernel's bound holds for its accumulators: operands rounded to TF32 change sums of up to 67 by 0.014, and Sigmoid passes on a quarter of it,
    which is 0.0034 of a result that cannot exceed 1.
    """
    last = layer.regions["body"].outputs[0].maker if layer.op == "Fused" else layer
    if layer.op != "Fused" or not slope(last):
        return 0.0
    own = OPS[last.op].reference

    def linear(node, x, *bounds):
        return slope(node) * x if node is last else own(node, x, *bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPS, last.op, replace(OPS[last.op], reference=linear))
        accumulators = np.abs(reference(layer, arrays)[0].astype(np.float64))
    return accumulators[np.isfinite(accumulators)].max(initial=0.0)


def judge(got, want, rtol, dtype, where, accumulators=0.0):
    """Largest error and error in the Euclidean norm against the reference. `accumulators`: `reach` of the layer, for the largest error."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    limit = {"f16": 65504.0, "bf16": 3.3e38}.get(dtype.name, np.inf)
    ordinary = np.isfinite(want) & (np.abs(want) < limit)
    assert np.array_equal(np.isnan(got), np.isnan(want)), where
    got, want = got[ordinary], want[ordinary]
    if want.size:
        scale = max(np.abs(want).max(), SMALLEST.get(dtype.name, 1e-30))
        assert np.abs(got - want).max() / max(scale, accumulators) <= rtol, where
        # the norm of the scaled values is at least 1, unless all are below SMALLEST
        assert np.linalg.norm((got - want) / scale) <= rtol * max(np.linalg.norm(want / scale), 1.0), where


def judge_stored(layer, arrays, signature, kernel, ins, outs):
    """Compares a kernel's first output as stored with the reference of the values as stored in its first input; the other inputs are constants."""
    fed = [from_stored(ins[0], signature.inputs[0].format, arrays[0].shape).astype(np.float32), *arrays[1:]]
    want = reference(layer, fed)[0]
    judge(from_stored(outs[0], signature.outputs[0].format, want.shape), want, kernel.rtol, signature.outputs[0].dtype, str(signature))


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "i"), SAMPLES)
def test_samples_match_the_reference(gpu, op, i):
    layer, arrays = sample_layer(op, i)
    extreme = any(a is not None and a.dtype.kind == "f" and not np.isfinite(a).all() for a in arrays)
    for t, signature, config, kernel in planned(layer, gpu):
        if extreme and "cublaslt" in t.name:
            continue  # a library has its own order of accumulation: overflow of partial sums is implementation-defined
        with np.errstate(all="ignore"):  # extremes of f32 overflow 16-bit types
            got, fed = compute(gpu, layer, arrays, signature, kernel)
        for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
            if o.dtype == F8E4M3 and layer.op == "Fused":
                error, why = compute_float8_error(g, w)  # a value halfway between two may round either way
                assert error <= kernel.rtol, f"{t.name} {signature} {config}: {why or error}"
            elif w.dtype.kind != "f":
                # a value halfway between two integers may round either way
                quantizes = w.dtype.itemsize == 1 and layer.op in ("Fused", "QuantizeLinear")
                assert np.abs(g.astype(np.int64) - w.astype(np.int64)).max(initial=0) <= int(quantizes)
            else:
                judge(g, w, max(kernel.rtol, 0.0), o.dtype, f"{t.name} {signature} {config}", reach(layer, fed))
