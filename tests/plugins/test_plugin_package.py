"""A package outside whet (examples/plugin_package): its op is read from its domain, verified, timed, pruned, named in engines, required by them."""

import pytest

from support.plugin_package import OP, install, model, run, site_of


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder like site-packages, in which the example package is installed."""
    return install(tmp_path_factory.mktemp("site"))


BUILD = """
import sys, numpy as np, whet
from whet.builder import BuildConfig, build
from whet.ops import run_network
net = whet.network_from_onnx(open({model!r}, "rb").read())
assert [l.op for l in net.layers if "." in l.op] == ["com.example.vision.DeformableConv"]
plan = build(net, BuildConfig(timing_cache="", profiles=(({{"x": (1, 3, 12, 10)}}, {{"x": (2, 3, 12, 10)}}, {{"x": (2, 3, 12, 10)}}),)))
whet.write_engine(plan, {engine!r})
chosen = next(c.tactic for n, c in plan.choices.items() if n == "deform")
timed = {{t.tactic for t in plan.report.candidates["deform"]}}
x = {{"x": np.random.default_rng(1).standard_normal((2, 3, 12, 10)).astype("f4")}}
with whet.Runtime().load(plan).create_context() as context:
    got = context.run(x)["y"]
want = run_network(net, x)["y"]
print(chosen, sorted(timed), plan.plugins, float(np.abs(got - want).max() / np.abs(want).max()))
"""


@pytest.fixture(scope="module")
def output_and_engine(installed, tmp_path_factory):
    """Output of a build with the installed package, and its engine."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "m.onnx").write_bytes(model())
    engine = folder / "m.engine"
    return run(BUILD.format(model=str(folder / "m.onnx"), engine=str(engine)), installed).stdout, engine


def test_an_installed_package_is_found_by_its_entry_point_timed_and_verified(output_and_engine):
    out, _ = output_and_engine
    chosen, error = out.split()[0], float(out.split()[-1])
    assert chosen.startswith("cpu/whet_deformable.")  # faster than the reference, which einsum computes in float64
    assert "cpu/whet_deformable.matmul" in out
    assert "cpu/whet_deformable.pixels" in out
    assert error < 1e-5


def test_an_engine_names_the_package_and_runs_where_it_is_installed(output_and_engine, installed):
    out, engine = output_and_engine
    assert "{'whet_deformable': '1.0'}" in out
    code = f"import whet, numpy as np; e = whet.load({str(engine)!r}); print(e(np.ones((1, 3, 12, 10), 'f4')).shape)"
    assert run(code, installed).stdout.strip() == "(1, 4, 12, 10)"


def test_an_engine_whose_package_is_missing_says_so(output_and_engine):
    _, engine = output_and_engine
    done = run(f"import whet; whet.load({str(engine)!r})", check=False)
    assert "EngineError" in done.stderr
    assert "the engine needs the plugin package whet_deformable 1.0, not found here" in done.stderr
    assert "Plugin packages here: none" in done.stderr


def test_a_model_whose_package_is_missing_says_so(tmp_path):
    (tmp_path / "m.onnx").write_bytes(model())
    done = run(f"import whet; whet.network_from_onnx({str(tmp_path / 'm.onnx')!r})", check=False)
    assert "node 'deform' (com.example.vision.DeformableConv)" in done.stderr
    assert "whet.register" in done.stderr


def test_a_package_that_fails_to_import_is_named_where_its_op_is_missing(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no licence')\n")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[whet.plugins]\nbroken = broken_plugin\n")
    (tmp_path / "m.onnx").write_bytes(model())
    done = run(f"import whet; whet.network_from_onnx({str(tmp_path / 'm.onnx')!r})", tmp_path, check=False)
    assert "broken = broken_plugin failed to load: RuntimeError: no licence" in done.stderr


def test_another_version_of_the_package_is_reported_and_the_probe_runs(output_and_engine, installed, tmp_path):
    _, engine = output_and_engine
    code = f"""
import warnings, whet, numpy as np
from whet.plugin_packages import PACKAGES, load_installed
load_installed()
PACKAGES["whet_deformable"].version = "1.1"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    whet.load({str(engine)!r})(np.ones((1, 3, 12, 10), "f4"))
print([str(w.message) for w in caught])
"""
    assert "plugin whet_deformable: 1.0 there, 1.1 here" in run(code, installed).stdout


def test_channels_of_the_op_are_pruned_with_their_neighbours(installed, tmp_path):
    (tmp_path / "m.onnx").write_bytes(model())
    code = f"""
import whet
from whet.pruning import groups
print(sorted(g.size for g in groups(whet.network_from_onnx({str(tmp_path / "m.onnx")!r}))))
"""
    assert run(code, installed).stdout.strip() == "[6, 8]"  # the stem's channels, and the op's filters


def test_the_op_is_written_back_in_its_domain(installed, tmp_path):
    (tmp_path / "m.onnx").write_bytes(model())
    code = f"""
import onnx, whet
whet.save_onnx(whet.network_from_onnx({str(tmp_path / "m.onnx")!r}), {str(tmp_path / "again.onnx")!r})
m = onnx.load({str(tmp_path / "again.onnx")!r})
onnx.checker.check_model(m)
print([(n.domain, n.op_type, [a.name for a in n.attribute]) for n in m.graph.node if n.domain])
print([(o.domain, o.version) for o in m.opset_import if o.domain])
print([l.attrs for l in whet.network_from_onnx(m).layers if "." in l.op])
"""
    out = run(code, installed).stdout
    assert "('com.example.vision', 'DeformableConv', ['pads', 'strides'])" in out
    assert "[('com.example.vision', 1)]" in out
    assert "{'pads': (1, 1), 'strides': (1, 1)}" in out


def test_all_tactics_pass_the_samples(installed):
    code = f"from whet.plugins import check_samples\nfor c in check_samples({OP!r}): print(c.tactic, c.sample, c.error <= c.rtol)"
    out = run(code, installed).stdout
    assert {line.split()[0] for line in out.splitlines()} == {
        "cpu/numpy_reference", "cpu/whet_deformable.matmul", "cpu/whet_deformable.pixels",
    }  # fmt: skip
    assert "False" not in out


def test_a_wrong_kernel_is_found_and_not_selected(installed, tmp_path):
    """The build verifies plugins like whet's own kernels."""
    (tmp_path / "m.onnx").write_bytes(model())
    code = """
from whet_deformable import cpu
right = cpu.as_matmul
def wrong(layer, x, w, offset, bias=None):
    return right(layer, x, w, offset, bias) * 1.01
from whet.tactics import TACTICS
from whet.plugins import check_samples
TACTICS["cpu/whet_deformable.matmul"].function = wrong
del TACTICS["cpu/whet_deformable.pixels"]
try:
    check_samples("com.example.vision.DeformableConv")
except Exception as e:
    print(type(e).__name__, e)
""" + BUILD.format(model=str(tmp_path / "m.onnx"), engine=str(tmp_path / "m.engine"))
    out = run(code, installed).stdout.splitlines()
    assert out[0].startswith("VerificationError sample 0 of com.example.vision.DeformableConv: cpu/whet_deformable.matmul")
    assert out[-1].split()[0] == "cpu/numpy_reference"


def test_the_cuda_kernel_compiles_and_its_parameters_match(installed):
    pytest.importorskip("cuda.bindings.nvrtc", reason="the cuda extra is not installed")
    code = f"""
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.ops import OPS, sample_layer, get_op
from whet.tactics import Args, list_tactics
tactics = {{t.name: t for t in list_tactics("cuda")}}
gather, gpu = tactics["cuda/whet_deformable.gather"], CompileOnlyGpu()
for k, pointers in ((0, 4), (1, 5)):
    _, layer, _ = sample_layer({OP!r}, get_op({OP!r}).samples[k])
    (signature,) = gather.signatures(layer, gpu)
    for config in gather.configs(layer, signature, gpu):
        kernel = gather.plan(layer, signature, config, gpu)
        (launch,) = kernel.launches(Args((0x1000,) * (pointers - 1), (0x2000,), (), 0))
        assert len(launch.offsets) == pointers + 13, launch.offsets
        assert launch.offsets[pointers] == 8 * pointers
        print(launch.kernel.name, launch.grid, launch.overlap)
"""
    out = run(code, installed).stdout.splitlines()
    assert out[0] == "deformable_conv (1, 3, 1) False"
    assert len(out) == 6


def test_the_triton_kernel_compiles_without_a_gpu(installed):
    pytest.importorskip("triton", reason="Triton is not installed")
    code = f"""
import warnings
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.ops import get_op, sample_layer
from whet.tactics import Args, list_tactics
tactic, gpu = next(t for t in list_tactics("cuda") if t.name == "cuda/whet_deformable.triton"), CompileOnlyGpu()
_, biased, _ = sample_layer({OP!r}, get_op({OP!r}).samples[1])
_, layer, _ = sample_layer({OP!r}, get_op({OP!r}).samples[0])
(signature,) = tactic.signatures(layer, gpu)
print(tactic.refuses(biased, tactic.signatures(biased, gpu)[0], gpu), tactic.refuses(layer, signature, gpu))
(launch,) = tactic.plan(layer, signature, (), gpu).launches(Args((0x1000,) * 3, (0x2000,), (), 0))
print(launch.grid, launch.block, len(launch.offsets))
"""
    assert run(code, installed, *site_of("triton")).stdout.splitlines() == ["adds no bias None", "(1, 3, 1) 128 19"]
