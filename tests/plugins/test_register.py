"""whet.register: what it refuses and why, and LLVM IR as text; in this process, with the registrations removed afterwards."""

import numpy as np
import pytest

from whet import register
from whet.errors import BuildError, NetworkError, UnsupportedError, UsageError, VerificationError
from whet.measure.timing_key import compute_source_digest
from whet.network import Layer, parse_network, static_shape
from whet.ops import OPS, get_op
from whet.plugin_packages import PACKAGES
from whet.plugins import CudaTactic, LlvmTactic, NumpyTactic, check_samples
from whet.plugins.cuda_tactic import pack_parameters
from whet.tactics import TACTICS


@pytest.fixture(autouse=True)
def registries():
    yield
    for registry in (OPS, TACTICS, PACKAGES):  # whet's own entries, loaded meanwhile, stay
        for name in [n for n in registry if "acme" in n or n.startswith("com.other")]:
            del registry[name]


def infer(layer: Layer):
    return layer.needs(0).type


def twice(layer, x):
    return x * x.dtype.type(2)


def add(**changes):
    given = {"domain": "com.acme", "package_name": "acme", "version": "2", "samples": [(["f32[3,40]"], {})]} | changes
    return register("Twice", infer, twice, **given)


IR = """
define void @double(i64* %context, i64 %begin, i64 %end) {
entry:
  %words = getelementptr i64, i64* %context, i64 1
  %source = load i64, i64* %context
  %target = load i64, i64* %words
  %x = inttoptr i64 %source to float*
  %y = inttoptr i64 %target to float*
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
  %from = getelementptr float, float* %x, i64 %i
  %to = getelementptr float, float* %y, i64 %i
  %a = load float, float* %from
  %b = fmul float %a, FACTOR
  store float %b, float* %to
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %end
  br i1 %again, label %loop, label %done
done:
  ret void
}
"""


def double(factor="0x4000000000000000", **options):
    return LlvmTactic("double", items="count", words=lambda layer: {"count": int(np.prod(static_shape(layer.output.shape)))},
                      ir=lambda layer: IR.replace("FACTOR", factor), **options)  # fmt: skip


def test_llvm_ir_as_text_is_compiled_shared_among_threads_and_checked():
    add(tactics=[double()])
    (own,) = [c for c in check_samples("com.acme.Twice") if c.tactic == "cpu/acme.double"]
    assert own.error == 0


def test_a_wrong_llvm_kernel_is_named():
    add(tactics=[double("0x4008000000000000")])  # 3
    with pytest.raises(VerificationError, match=r"sample 0 of com\.acme\.Twice: cpu/acme\.double .* differs from the reference by 0\.5"):
        check_samples("com.acme.Twice")


def test_an_op_is_known_by_domain_and_name_and_its_text_form_reads_back():
    add()
    text = "network n source\nin %x: f32[2,3]\n%y: f32[2,3] = com.acme.Twice(%x)\nout %y\n"
    (layer,) = parse_network(text).layers
    assert layer.op == "com.acme.Twice"
    assert (PACKAGES["acme"].version, PACKAGES["acme"].ops) == ("2", ["com.acme.Twice"])


def test_an_op_that_no_package_has_is_refused_with_the_packages_that_are_here():
    add()
    with pytest.raises(UnsupportedError, match=r"unknown op com\.acme\.Thrice\. .*Plugin packages here: .*acme 2.*whet\.register"):
        get_op("com.acme.Thrice")


@pytest.mark.parametrize(("changes", "message"), [
    ({"domain": ""}, "not a domain of your own"),
    ({"domain": "ai.onnx"}, "not a domain of your own"),
    ({"couple": None}, "an op has no field couple; it has"),
    ({"tactics": [twice]}, "a tactic of com.acme.Twice is of type function"),
    ({"tactics": [NumpyTactic("a", twice), NumpyTactic("a", twice)]}, "two tactics are called cpu/acme.a"),
    ({"package_name": "", "version": ""}, "no installed distribution has the package 'test_register'"),
])  # fmt: skip
def test_registrations_that_cannot_work_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        add(**changes)


def test_an_op_is_registered_once_and_a_package_has_one_version():
    add()
    with pytest.raises(UsageError, match=r"com\.acme\.Twice is registered already"):
        add()
    with pytest.raises(UsageError, match="as version 2 and as version 3"):
        add(domain="com.other", version="3")


def test_tactics_refuse_arguments_that_cannot_work():
    with pytest.raises(UsageError, match="needs its function as emit="):
        LlvmTactic("a", items="n", words=lambda layer: {})
    with pytest.raises(UsageError, match="cannot store f32 tensors as f8"):
        NumpyTactic("a", twice, types=("f8",))


def test_samples_that_disagree_with_infer_or_reach_no_tactic_are_reported():
    register("Wrong", infer, lambda layer, x: x.T, domain="com.acme", package_name="acme", version="2", samples=[(["f32[2,3]"], {})])
    with pytest.raises(NetworkError, match="infer gives"):
        check_samples("com.acme.Wrong")
    never = NumpyTactic("never", twice, refuses=lambda layer: "only on Mondays")
    add(tactics=[never])
    with pytest.raises(BuildError, match=r"no sample of com\.acme\.Twice is computed by cpu/acme\.never"):
        check_samples("com.acme.Twice")


def test_the_source_of_the_users_functions_is_part_of_timing_keys():
    add(tactics=[NumpyTactic("a", twice)])
    own = TACTICS["cpu/acme.a"]
    assert set(own.source_modules()) >= {twice.__module__, "whet.plugins.numpy_tactic"}
    before = compute_source_digest(own)
    own.function = check_samples  # another module
    assert compute_source_digest(own) != before
    assert own.library_version() == "acme 2"


def test_kernel_parameters_are_aligned_to_their_sizes():
    packed, offsets = pack_parameters([np.uint64(1), 7, np.uint64(2), 0.5, np.int64(-1), True])
    assert offsets == (0, 8, 16, 24, 32, 40)
    padding = np.int32(0)
    parts = (np.uint64(1), np.int32(7), padding, np.uint64(2), np.float32(0.5), padding, np.int64(-1), np.bool_(True))
    assert packed == b"".join(a.tobytes() for a in parts)


def test_cuda_tactics_need_no_gpu_to_be_registered():
    add(tactics=[CudaTactic("k", "", "k", grid=lambda layer, config: 1)])
    assert "cuda/acme.k" in TACTICS
