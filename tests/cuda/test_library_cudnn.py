"""The cuDNN pack: the graphs that the library receives (a fake library), engine selection; on a GPU every engine against the reference."""

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from test_tactics import HOPPER, compute, judge, reach, reference

from whet.backends.cuda import driver
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.backends.cuda.cudnn import convolution, descriptor, library
from whet.backends.cuda.cudnn import numbers as n
from whet.backends.cuda.cudnn.convolution import Convolution, Proposal, is_fusible
from whet.builder import BuildConfig, build
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.errors import BackendError
from whet.network import Network, parse_type
from whet.ops import OPS, run_network, sample_layer
from whet.runtime import Runtime
from whet.tactics import get_tactic
from whet.tactics._base import PlanRefused
from whet.tactics.cuda.library import _cudnn_conv

HERE = CompileOnlyGpu(executes=True)
PACK = {"cuda/cudnn_f32", "cuda/cudnn_half", "cuda/cudnn_tf32"}
RELU = ("clip", 0.0, np.inf)


class FakeLibrary:
    """Records the attributes of descriptors; values are plain numbers, descriptors their index in `made`. Kinds in `refused` fail."""

    def __init__(self, refused=()):
        self.made, self.destroyed, self.refused = [], [], refused

    def cudnnBackendCreateDescriptor(self, kind, at):
        self.made.append({"kind": kind.value})
        at._obj.value = len(self.made)
        return 0

    def cudnnBackendSetAttribute(self, handle, attribute, kind, count, array):
        assert count == len(array)
        self.made[handle.value - 1][attribute] = list(array)
        return 0

    def cudnnBackendFinalize(self, handle):
        return 3004 if self.made[handle.value - 1]["kind"] in self.refused else 0

    def cudnnBackendDestroyDescriptor(self, handle):
        self.destroyed.append(handle.value)
        return 0

    def cudnnGetLastErrorString(self, text, size):
        ctypes.memmove(text, b"because", 8)

    def of(self, kind):
        return [d for d in self.made if d["kind"] == kind]


@pytest.fixture
def fake(monkeypatch):
    made = FakeLibrary()
    monkeypatch.setattr(library, "load_library", lambda: made)
    return made


def work(**more):
    return Convolution((2, 32, 9, 8), (16, 4, 3, 5), (2, 16, 5, 4), (2, 2), (1, 2, 0, 1), (1, 1), "f16", True, **more)


def test_a_convolution_is_described_channels_last_with_both_paddings(fake):
    made = convolution.list_operations(work())
    (shape,) = fake.of(n.CONVOLUTION)
    assert (shape[n.PRE_PADDINGS], shape[n.POST_PADDINGS], shape[n.STRIDES]) == ([1, 2], [0, 1], [2, 2])
    assert shape[n.COMPUTE_TYPE] == [n.DATA_TYPES["f32"]]
    tensors = {t[n.TENSOR_ID][0]: t for t in fake.of(n.TENSOR)}
    assert tensors[convolution.X][n.TENSOR_DIMS] == [2, 32, 9, 8]
    assert tensors[convolution.X][n.TENSOR_STRIDES] == [9 * 8 * 32, 1, 8 * 32, 32]
    assert tensors[convolution.W][n.TENSOR_STRIDES] == [60, 1, 20, 4]  # k, r, s, c/groups
    assert {t[n.TENSOR_TYPE][0] for t in tensors.values()} == {n.DATA_TYPES["f16"]}
    assert len(made) == 1
    (head,) = fake.of(n.FORWARD)
    assert (head[n.FORWARD_ALPHA], head[n.FORWARD_BETA]) == ([1.0], [0.0])


@pytest.mark.parametrize(("residual", "order"), [(0, ("b", "act")), (1, ("z", "b", "act")), (2, ("b", "act", "z"))])
def test_steps_have_the_order_of_precompiled_engines(fake, residual, order):
    w = work(bias=True, residual=residual, activation=RELU)
    assert w.steps == order
    convolution.list_operations(w)
    modes = [s[n.POINTWISE_MODE][0] for s in fake.of(n.POINTWISE)]
    assert modes == [n.RELU if s == "act" else n.ADD for s in order]
    tensors = fake.of(n.TENSOR)
    assert sum(t[n.TENSOR_VIRTUAL][0] for t in tensors) == len(order), "all between the convolution and the last step"
    assert [t[n.TENSOR_TYPE] for t in tensors if t[n.TENSOR_VIRTUAL][0]] == [[n.DATA_TYPES["f32"]]] * len(order)
    y = next(i for i, d in enumerate(fake.made, 1) if d.get(n.TENSOR_ID) == [convolution.Y])
    assert fake.of(n.OPERATION_POINTWISE)[-1][n.OPERATION_Y] == [y], "the last step writes the result"


def test_a_transposed_convolution_is_the_gradient_of_an_input(fake):
    convolution.list_operations(Convolution((1, 8, 5, 5), (8, 6, 2, 2), (1, 6, 10, 10), (2, 2), (0, 0, 0, 0), (1, 1), "f32", False, transposed=True))
    (head,) = fake.of(n.BACKWARD_DATA)
    ids = {d[n.TENSOR_ID][0]: i for i, d in enumerate(fake.made, 1) if n.TENSOR_ID in d}
    assert (head[n.BACKWARD_DY], head[n.BACKWARD_DX], head[n.BACKWARD_W]) == ([ids[convolution.X]], [ids[convolution.Y]], [ids[convolution.W]])


def test_activations_with_their_parameters(fake):
    for activation in (("clip", 0.0, 6.0), ("leaky_relu", 0.1, 0.0), ("elu", 0.7, 0.0), ("silu", 0.0, 0.0)):
        assert is_fusible(activation)
        convolution.list_operations(work(bias=True, activation=activation))
    relu6, leaky, elu, silu = [s for s in fake.of(n.POINTWISE) if s[n.POINTWISE_MODE] != [n.ADD]]
    assert relu6[n.RELU_HIGH] == [6.0]
    assert leaky[n.RELU_SLOPE] == [0.1]
    assert elu[n.ELU_ALPHA] == [0.7]
    assert silu[n.POINTWISE_MODE] == [n.SWISH]
    assert not is_fusible(("clip", -1.0, 1.0))
    assert not is_fusible(("hardswish", 0.0, 0.0))


def test_descriptors_are_freed_and_failures_name_call_and_reason(fake):
    convolution.list_operations(work(bias=True, activation=RELU))
    assert sorted(fake.destroyed) == list(range(1, len(fake.made) + 1)), "all descriptors are freed with their operations"
    fake.refused = (n.CONVOLUTION,)
    with pytest.raises(library.CudnnError, match=r"a convolution: this layout is not supported \(status 3004, because\).*-CUDNN.* builds without"):
        convolution.list_operations(work())
    with pytest.raises(BackendError, match="no address"):
        convolution.make_variant_pack({convolution.X: 0}, 1)
    made = descriptor.Descriptor(n.PACK, "a pack").set(n.PACK_POINTERS, n.T_POINTER, 1 << 40)
    assert fake.made[made.handle.value - 1][n.PACK_POINTERS] == [1 << 40]


def test_the_pack_is_off_by_default_and_switched_as_a_family():
    def names(*switches):
        return {t.name for t in list_enabled_tactics("cuda", switches) if "cudnn" in t.name}

    assert names() == set()
    assert names("+CUDNN") == PACK
    assert names("+CUDNN", "-cudnn_tf32") == {"cuda/cudnn_f32", "cuda/cudnn_half"}
    assert names("+CUDNN", "-CUDNN") == set(), "the switch that --pure appends"
    assert {t.name for t in list_enabled_tactics("cuda", ("+CUDNN", "-CUBLAS_LT")) if "cublaslt" in t.name} == set()


@pytest.mark.parametrize(
    ("flags", "packs"),
    [
        ([], {"cublaslt_f32", "cublaslt_older", "cublaslt_tf32"}),
        (["--tacticSources=+CUDNN,-CUBLAS_LT"], {"cudnn_f32", "cudnn_half", "cudnn_tf32"}),
        (["--tacticSources=+CUDNN", "--noTF32"], {"cublaslt_f32", "cublaslt_older", "cudnn_f32", "cudnn_half"}),
        (["--tacticSources=+CUDNN,+cublaslt_half", "--pure"], set()),
    ],
)
def test_flags_of_exec_choose_the_packs(flags, packs):
    from whet.cli._exec_config import Options, list_tactic_sources
    from whet.cli._exec_flags import parse

    chosen = list_enabled_tactics("cuda", list_tactic_sources(Options(*parse(["--onnx=x.onnx", "--backend=cuda", *flags]))))
    assert {t.name.rpartition("/")[2] for t in chosen if t.name.startswith(("cuda/cublaslt_", "cuda/cudnn_"))} == packs


def test_engines_that_round_more_than_is_allowed_do_not_compute():
    half, f32, tf32 = (get_tactic(f"cuda/cudnn_{k}") for k in ("half", "f32", "tf32"))
    tensor = frozenset({"tensor core"})
    assert half.why_not_allowed(tensor) is None
    assert "TF32" in f32.why_not_allowed(tensor)
    assert "full f32" in tf32.why_not_allowed(frozenset())
    for note in ("down-convert", "reduced-precision sums", "int8x32 filters"):
        for t in (half, f32, tf32):
            assert note in t.why_not_allowed(tensor | {note})
    f32_type, f16_type = (o.dtype for o in (f32.signatures(sample_layer("Conv", OPS["Conv"].samples[0])[1], HERE)[0].outputs[0],
                                            half.signatures(sample_layer("Conv", OPS["Conv"].samples[0])[1], HERE)[0].outputs[0]))  # fmt: skip
    assert f32.bound(frozenset({"Winograd", "Winograd 4x4"}), f32_type) > f32.bound(frozenset(), f32_type) == 1e-5
    assert half.bound(frozenset({"Winograd"}), f16_type) > half.bound(tensor, f16_type) == 2e-3
    assert tf32.bound(tensor, f32_type) == 2e-3


def test_the_first_proposal_and_every_engine_once_are_timed():
    t = get_tactic("cuda/cudnn_half")
    tensor, slow = frozenset({"tensor core"}), frozenset({"tensor core", "compiled at run time"})
    proposals = [Proposal(62, ((2, i),), tensor, "a") for i in range(40)] + [Proposal(0, (), frozenset(), "fallback")]
    proposals += [Proposal(30 + i, (), tensor, "all") for i in range(3)] + [Proposal(40, (), tensor | {"down-convert"}, "all")]
    proposals += [Proposal(80 + i, (), slow, "all") for i in range(6)]
    got = t.choose_proposals(proposals, 20)
    assert len(got) == len(set(got)) == 20
    assert got[:10] == proposals[:10]
    assert {p.engine for p in got} == {62, 0, 30, 31, 32}, "each engine; none that rounds its operands, none that compiles for a second"
    assert [p.engine for p in t.choose_proposals(proposals[-6:], 20)] == [80], "unless there is no other"
    assert t.choose_proposals(proposals[-6:], 20, last=False) == []


def test_refusals():
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[0])
    t = get_tactic("cuda/cudnn_tf32")
    signature = t.signatures(layer, HERE)[0]
    assert "on the GPU that it runs on" in t.refuses(layer, signature, HOPPER)
    good = {"math": "tf32", "form": "fused", "engine": 3, "k2": 5}
    for change in ({"math": "f32"}, {"form": "split"}, {"engine": -1}, {"engine": "x"}, {"k": 1}, {"k2": "x"}, {"knob2": 1}):
        with pytest.raises(PlanRefused, match="computes in tf32 by an engine"):
            t.plan(layer, signature, tuple({**good, **change}.items()), HERE)
    _, line, _ = sample_layer("Conv", next(s for s in OPS["Conv"].samples if s.inputs[0].count(",") == 2))
    assert "two spatial axes" in t.why_not(line)


def test_workspaces_of_a_gigabyte_are_refused_and_others_counted(monkeypatch):
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[0])
    t = get_tactic("cuda/cudnn_half")
    signature, config = t.signatures(layer, HERE)[0], (("math", "half"), ("form", "fused"), ("engine", 13))
    for workspace, fits in ((1 << 30, False), (1000, True)):
        plan = convolution.Plan(None, workspace, frozenset({"FFT"}))
        monkeypatch.setattr(_cudnn_conv, "plan_of", lambda work, engine, knobs, plan=plan: plan)
        if fits:
            kernel = t.plan(layer, signature, config, HERE)
            assert kernel.scratch >= 1000
            assert "engine 13 (FFT)" in kernel.implementation
            assert kernel.rtol > 2e-3, "a transform loses precision"
        else:
            with pytest.raises(PlanRefused, match="1024 MiB of workspace"):
                t.plan(layer, signature, config, HERE)


def test_the_error_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(library, "load_library", lambda: None)
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[0])
    t = get_tactic("cuda/cudnn_half")
    signature = t.signatures(layer, HERE)[0]
    assert "pip install whet[cudnn]" in t.refuses(layer, signature, HERE)
    assert t.library_version() == ""
    with pytest.raises(BackendError, match=r"pip install whet\[cudnn\]"):
        t.plan(layer, signature, (("math", "half"), ("form", "fused"), ("engine", 0)), HERE)  # an engine of another machine


def test_the_version_is_in_the_timing_key(monkeypatch):
    from whet.measure.timing_key import make_timing_key

    t, keys = get_tactic("cuda/cudnn_half"), set()
    for number in (91900, 92100):
        monkeypatch.setattr(library, "load_library", lambda number=number: SimpleNamespace(cudnnGetVersion=lambda: number))
        keys.add(make_timing_key(t, "layer", t.signatures(sample_layer("Conv", OPS["Conv"].samples[0])[1], HERE)[0], (), "gpu", "hot"))
    assert t.library_version() == "cudnn 9.21.0"
    assert len(keys) == 2


# On a GPU


@pytest.fixture(scope="module")
def gpu():
    if driver.why_unavailable():
        pytest.skip(driver.why_unavailable())
    if library.load_library() is None:
        pytest.skip("libcudnn is not installed")
    from whet.backends import get_backend

    return get_backend("cuda")


def layers():
    for op in ("Conv", "ConvTranspose", "Fused"):
        for i, sample in enumerate(OPS[op].samples):
            layer = sample_layer(op, sample)[1]
            if get_tactic("cuda/cudnn_half").why_not(layer) is None:
                yield op, i


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(PACK))
@pytest.mark.parametrize(("op", "i"), list(layers()))
def test_every_engine_matches_the_reference(gpu, op, i, name):
    _, layer, arrays = sample_layer(op, OPS[op].samples[i])
    if any(a is not None and a.dtype.kind == "f" and not np.isfinite(a).all() for a in arrays):
        pytest.skip("a library has its own order of accumulation: overflow of partial sums is implementation-defined")
    t, ran, refused, wrong = get_tactic(name), [], [], []
    for signature in t.signatures(layer, gpu):
        assert t.refuses(layer, signature, gpu) is None
        for config in t.configs(layer, signature, gpu):
            try:
                kernel = t.plan(layer, signature, config, gpu)
            except (PlanRefused, library.CudnnError) as e:
                refused.append((config, str(e)))
                continue
            with np.errstate(all="ignore"):
                got, fed = compute(gpu, layer, arrays, signature, kernel)
            try:
                for g, w, o in zip(got, reference(layer, fed), signature.outputs, strict=True):
                    judge(g, w, kernel.rtol, o.dtype, kernel.implementation, reach(layer, fed))
            except AssertionError:
                wrong.append((kernel.implementation, str(signature), config))
            ran.append(kernel.implementation)
    assert wrong == []
    assert len(ran) >= 2, refused


def mixed():
    """A stem, grouped, dilated and strided convolutions, a residual, an activation that the library lacks, a transposed convolution."""
    rng = np.random.default_rng(0)
    net = Network("net")

    def weight(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32))

    x = net.add_input("x", parse_type("f32[6,3,24,24]"))
    a = net.add("Relu", net.add("Conv", x, weight(32, 3, 5, 5), weight(32), pads=(2, 2, 2, 2)))
    b = net.add("HardSwish", net.add("Conv", a, weight(32, 8, 3, 3), weight(32), group=4, pads=(1, 0, 1, 2)))
    c = net.add("Relu", net.add("Add", net.add("Conv", b, weight(32, 32, 3, 3), None, dilations=(2, 2), pads=(2, 2, 2, 2)), b))
    d = net.add("ConvTranspose", c, weight(32, 16, 2, 2), weight(16), strides=(2, 2))
    net.mark_output(net.add("Conv", d, weight(8, 16, 3, 3), None, strides=(2, 2)), "y")
    return net


OWN_TF32 = ("stem_tf32", "few_channel_conv_tf32", "multi_tensor_conv_tf32", "conv_tf32")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "precisions", "bound"), [("cudnn_half", ("fp16",), 4e-3), ("cudnn_tf32", (), 4e-3), ("cudnn_f32", (), 2e-5)])
def test_networks_run_through_the_library(gpu, name, precisions, bound):
    own = ("conv_generic", "conv", "stem", "stem_as_channels", "depthwise", "conv_3xtf32", *OWN_TF32)
    away = ("CUBLASLT", *own, *(k.rpartition("/")[2] for k in sorted(PACK)))
    switches = ("+CUDNN", *(f"-{t}" for t in away if t != name))
    net = mixed()
    config = BuildConfig(backend="cuda", timing_cache="", tactic_sources=switches, precisions=precisions, avg_timing=2, whole_engines=1)
    plan = build(net, replace(config, deterministic=True))
    assert {c.tactic for c in plan.choices.values()} >= {f"cuda/{name}"}
    assert plan.report.verification.failures == []
    engine = Runtime("cuda").load(plan)
    x = {"x": np.random.default_rng(1).standard_normal((6, 3, 24, 24)).astype(np.float32)}
    first, second = engine.create_context(), engine.create_context()  # two contexts share plans, but not handles
    got = first.run(x)["y"]
    want = run_network(net, x, widen=True)["y"]
    assert np.abs(got - want).max() / np.abs(want).max() < bound
    assert np.array_equal(second.run(x)["y"], got)
    again = []

    def work():  # each with its own context: the same plans at the same time through different handles
        context = engine.create_context()
        again.extend(np.array_equal(context.run(x)["y"], got) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert again == [True] * 20
    bound_ = first.launches()
    assert bound_.executable.graph_refused == "", "the library's launches go into a CUDA graph"
    bound_.executable.use_graph = False
    assert np.array_equal(first.run(x)["y"], got)


@pytest.mark.gpu
def test_plans_and_workspaces_are_freed(gpu):
    _, layer, _ = sample_layer("Conv", OPS["Conv"].samples[1])
    t = get_tactic("cuda/cudnn_half")
    signature = t.signatures(layer, gpu)[0]
    kernels = []
    for config in t.configs(layer, signature, gpu):
        try:
            kernels.append(t.plan(layer, signature, config, gpu))
        except (PlanRefused, library.CudnnError):
            continue
    assert len(convolution.live_plans) >= len(kernels) > 3
    assert all(k.scratch >= 256 for k in kernels)
    before = len(convolution.live_plans)
    count = len({k.implementation for k in kernels})
    del kernels
    assert before - len(convolution.live_plans) >= count
    assert _cudnn_conv.work_of(layer, signature.outputs[0], _cudnn_conv.match_cudnn_epilogue(layer), "apart") is not None
