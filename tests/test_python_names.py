"""Python callers read Python names and get warnings and errors; the command line reads its flags. One mechanism for all texts."""

import warnings

import numpy as np
import pytest
from click.testing import CliRunner

import whet
from whet.cli import group
from whet.errors import BuildWarning, EngineError, ShapeError, UsageError
from whet.frontends import save_onnx
from whet.network import parse_network
from whet.option_names import translate_flags

QUICK = {"backend": "null", "timing_cache": "", "optimization_level": 0}
CONV = "network n source\nin %x: f32[N,4,8,8]\nconst %w: f32[4,4,1,1] = seed(1)\n%y = Conv(%x, %w)\nout %y\n"


@pytest.mark.parametrize(
    ("flags", "python"),
    [
        ("Use --backend=cpu.", "Use backend='cpu'."),
        ("build with --tacticSources=-CUBLASLT.", "build with tactic_sources=('-CUBLASLT',)."),
        ("--builderOptimizationLevel=0 may avoid it", "optimization_level=0 may avoid it"),
        ("larger --maxShapes (or another --profile)", "larger max shapes (profiles=) (or another profile)"),
        ("--layerPrecisions=NAME:fp32.", "layer_precisions=(('NAME', 'fp32'),)."),
        ("--memPoolSize=workspace allows 2", "memory_limit['workspace'] allows 2"),
        ("Run `whet prune --calibData` or give --calibData", "Run `whet prune --calibData` or give Calibration(samples=...)"),
        ("Leave out --strict", "Leave out strict=True"),
        ("Give --calibData=DIR|FILE.npz or --calib=CACHE.", "Give Calibration(samples=...) or Calibration(cache=...)."),
        ("(--int8, --best)", "(precisions=('int8',), precisions=('best',))"),
        ("whet prune --list shows them; a--b, --unknown", "whet prune --list shows them; a--b, --unknown"),
    ],
)
def test_flags_become_python_names(flags, python):
    assert translate_flags(flags) == python
    assert str(UsageError(flags)) == python


def test_a_dynamic_batch_that_is_pinned_is_a_warning():
    net = parse_network(CONV)
    with pytest.warns(BuildWarning, match=r"no profile gives its shape: the engine is built for \[1, 4, 8, 8\]. Use profiles=") as found:
        plan = whet.builder.build(net, whet.BuildConfig(**QUICK))
    assert len(found) == len(plan.report.notes)
    assert found[0].filename == __file__
    shape = {"x": (2, 4, 8, 8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whet.builder.build(net, whet.BuildConfig(**QUICK, profiles=((shape,) * 3,)))


def test_the_function_for_users_names_its_own_parameter():
    with pytest.warns(BuildWarning, match=r"the engine is built for \[1, 4, 8, 8\]. Use shapes="):
        whet.build(parse_network(CONV), **QUICK)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_eight_bits_without_ranges_are_refused(precision):
    with pytest.raises(UsageError, match=r"needs ranges, and the network has no Q/DQ nodes: call whet\.builder\.build_\w+\(net, config, Calibration"):
        whet.builder.build(parse_network(CONV), whet.BuildConfig(**QUICK, precisions=(precision,)))


def test_an_input_outside_of_the_profile_names_profiles_in_python_and_flags_on_the_command_line(tmp_path):
    shape = {"x": (1, 4, 8, 8)}
    config = whet.BuildConfig(backend="cpu", timing_cache="", optimization_level=0, profiles=((shape,) * 3,))
    plan = whet.builder.build(parse_network(CONV), config)
    context = whet.Runtime().load(plan).create_context()
    with pytest.raises(ShapeError, match="larger max shapes"):
        context.run({"x": np.zeros((2, 4, 8, 8), np.float32)})
    with pytest.raises(ShapeError, match="smaller min shapes"):
        context.run({"x": np.zeros((0, 4, 8, 8), np.float32)})
    save_onnx(parse_network(CONV), tmp_path / "n.onnx")
    done = CliRunner().invoke(group, ["exec", f"--onnx={tmp_path / 'n.onnx'}", "--backend=null", "--noFuse=nothing", "--noBuilderCache"])
    assert "--noFuse=nothing: the network has no such node" in done.output
    done = CliRunner().invoke(group, ["explain", str(tmp_path / "n.onnx")])
    assert "--onnx=" in str(done.exception), "an error keeps the names of the interface that it was raised in"
    with pytest.raises(EngineError, match="not an engine of whet"):
        whet.Runtime().load(tmp_path / "n.onnx")


def test_the_command_line_prints_notes_and_gives_no_warnings(tmp_path):
    save_onnx(parse_network(CONV), tmp_path / "n.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = CliRunner().invoke(group, ["exec", f"--onnx={tmp_path / 'n.onnx'}", "--backend=null", "--int8", "--skipInference", "--noBuilderCache"])
    assert done.exit_code == 0, done.output
    assert "PASSED" in done.output
