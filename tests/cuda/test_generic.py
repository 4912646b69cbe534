"""Kernels for coverage: every sample against the op's reference on the host's compiler, and the list of what no CUDA kernel computes."""

from functools import cache
from itertools import groupby

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, SAMPLES, TACTICS, judge, reach, reference, sample_layer

from support.host_cuda import HostLaunch, compile_launches, host_compiler, stored
from whet.backends.cuda.compile import compile_cubin
from whet.network import static_shape
from whet.ops import OPS
from whet.tactics import Args
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.generic import _per_value
from whet.tactics.cuda.recurrent import recurrent

GENERIC = [t for t in TACTICS if isinstance(t, (_per_value.PerValueTactic, recurrent.Recurrent))]


def offers(layer):
    """(tactic, signature) that a generic tactic can compute, also where a build uses a faster tactic."""
    for t in GENERIC:
        if t.why_not(layer) is None:
            for s in t.signatures(layer, HOPPER):
                yield t, s


OPS_HERE = sorted({op for t in GENERIC for op in t.ops if op in OPS})


def list_cases(op):
    """The launches of an op's samples, and the operands that they use."""
    launches, checks = [], []
    with pytest.MonkeyPatch.context() as patch:
        for module in (_per_value, recurrent):
            patch.setattr(module, "launch", lambda *launch: launches.append(HostLaunch.of(*launch)))
        checks.extend(launch_samples(op))
    return launches, checks


def launch_samples(op):
    for i in (i for name, i in SAMPLES if name == op):
        layer, arrays = sample_layer(op, i)
        for t, s in offers(layer):
            kernel = t.plan(layer, s, (), HOPPER)
            with np.errstate(all="ignore"):
                ins = [None if a is None or o is None else stored(a, o.dtype) for a, o in zip(arrays, s.inputs, strict=True)]
                outs = [np.full(static_shape(x.shape), 77, np.float32).astype(o.dtype.numpy) for x, o in zip(layer.outputs, s.outputs, strict=True)]
            packed, scratch = [p.make() for p in kernel.packed], np.zeros(kernel.scratch, np.uint8)
            kernel.launches(Args(tuple(map(address, ins)), tuple(map(address, outs)), tuple(map(address, packed)), address(scratch)))
            yield layer, arrays, ins, outs, s, kernel, t, packed, scratch


TOGETHER = 16  # ops whose kernels are compiled in one call: most of a small call's time is the standard headers


@pytest.fixture(scope="module")
def cases_of():
    """op -> its launches, its operands and a function that runs launches."""

    @cache
    def group(start):
        cases = {op: list_cases(op) for op in OPS_HERE[start : start + TOGETHER]}
        run = compile_launches([x for launches, _ in cases.values() for x in launches])
        return {op: (*case, run) for op, case in cases.items()}

    return lambda op: group(OPS_HERE.index(op) // TOGETHER * TOGETHER)[op]


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("op", OPS_HERE)
def test_kernels_match_the_reference_on_the_host(op, cases_of):
    launches, checks, run = cases_of(op)
    assert checks, "a generic tactic takes a sample of each of its ops"
    run(launches)
    for layer, arrays, ins, outs, s, kernel, t, *_ in checks:
        with np.errstate(all="ignore"):
            narrow = s.outputs[0].dtype.numpy if t.name == "cuda/recurrent" else None  # its weights are packed in the type of the values
            fed = [
                a if a is None else x.astype(a.dtype) if x is not None else a if narrow is None else a.astype(narrow).astype(a.dtype)
                for a, x in zip(arrays, ins, strict=True)
            ]
            wanted = reference(layer, fed)
            for result, want, o in zip(outs, wanted, s.outputs, strict=True):
                got = result.reshape(want.shape)
                if want.dtype.kind not in "fV":
                    np.testing.assert_array_equal(got, want)
                else:
                    judge(got, want, max(kernel.rtol, 1e-6), o.dtype, f"{t.name} {s}", reach(layer, fed))


@pytest.mark.parametrize("signatures", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.slow)], ids=["first_type", "other_types"])
@pytest.mark.parametrize("op", OPS_HERE)
def test_kernels_compile_for_the_gpu(op, signatures, monkeypatch):
    """per_value.cu and recurrent.cu through NVRTC for sm_90a: each op's first sample, in every type of the signatures of each tactic."""
    sources = set()
    for module in (_per_value, recurrent):
        monkeypatch.setattr(
            module, "launch", lambda entry, arguments, constants, *_: sources.add(emit_kernel_source(arguments.kernel_file, constants))
        )
    layer, _ = sample_layer(op, next(i for name, i in SAMPLES if name == op and any(offers(sample_layer(name, i)[0]))))
    pairs = sorted(offers(layer), key=lambda pair: pair[0].name)
    for t, s in (pair for _, of_tactic in groupby(pairs, key=lambda pair: pair[0]) for pair in list(of_tactic)[signatures]):
        kernel = t.plan(layer, s, (), HOPPER)
        kernel.launches(Args((0,) * len(layer.inputs), (0,) * len(layer.outputs), (0,) * len(kernel.packed), 0))
    for text in sources:
        assert compile_cubin(text).startswith(b"\x7fELF")


def address(a):
    return 0 if a is None else a.ctypes.data


_SIZED_BY_DATA = "the size of its result depends on its data: computed on the host after the kernels"
#: Op types of which the host must compute some sample, or all, with the reason. The list only shrinks.
WITHOUT_KERNEL = {
    "Compress": _SIZED_BY_DATA,
    "NonMaxSuppression": _SIZED_BY_DATA,
    "NonZero": _SIZED_BY_DATA,
    "Unique": _SIZED_BY_DATA,
    "Cast": "8-bit floats as results",
    "Fused": "composites of the CPU, taken apart for GPUs",
    "If": "control flow runs on the host",
    "Loop": "control flow runs on the host",
    "MelWeightMatrix": "a constant, folded by passes",
    "Scan": "control flow runs on the host",
    "SelectBoxes": "NonMaxSuppression on the host",
}


def test_the_ops_without_a_kernel_are_listed():
    def computed(layer):
        return any(not t.why_not(layer) and any(not t.refuses(layer, s, HOPPER) for s in t.signatures(layer, HOPPER)) for t in TACTICS)

    missing = {op for op, i in SAMPLES if not computed(sample_layer(op, i)[0])}
    assert missing == set(WITHOUT_KERNEL)
