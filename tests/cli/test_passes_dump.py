"""`whet passes MODEL --dump=DIR`: networks after each pass as text and as ONNX files that share weights."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import whet
from whet import zoo
from whet.cli import group
from whet.frontends.onnx_diagram import DOMAIN, DiagramFolder
from whet.network import parse_network


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("dump")
    zoo.save("squeezenet1_1", made / "s.onnx", batch=1, image=64)
    return made


def call(*arguments):
    return CliRunner().invoke(group, list(map(str, arguments)))


@pytest.fixture(scope="module")
def files(folder):
    done = call("passes", folder / "s.onnx", "--dump", folder / "d", "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_each_pass_that_fired_has_a_file(folder, files):
    names = [f.rsplit("/", 1)[1] for f in files]
    assert names[0] == "000_source.onnx"
    assert names[-1].endswith("_lowered.onnx")
    assert any("fuse_conv_activation" in n for n in names)
    assert all((folder / "d" / n.replace(".onnx", ".txt")).read_text().startswith("network ") for n in names)
    lowered = [onnx.load(f, load_external_data=False) for f in files]
    assert len(lowered[-1].graph.node) < len(lowered[0].graph.node)
    assert sum((folder / "d" / n).stat().st_size for n in names) < 1e6, "weights are in the shared file"


def test_fused_layers_are_functions_and_the_dump_computes_the_same(files):
    onnxruntime = pytest.importorskip("onnxruntime")
    for f in files:
        onnx.checker.check_model(f)
    model = onnx.load(files[-1])
    assert {x.domain for x in model.functions} == {DOMAIN}
    assert any(n.domain == DOMAIN and n.op_type.startswith("Conv+Relu") for n in model.graph.node)
    x = np.random.default_rng(0).standard_normal((1, 3, 64, 64)).astype(np.float32)
    first, last = (onnxruntime.InferenceSession(f, providers=["CPUExecutionProvider"]).run(None, {"input": x})[0] for f in (files[0], files[-1]))
    np.testing.assert_allclose(last, first, rtol=1e-3, atol=1e-4)


def test_an_engine_has_its_lowered_network_with_reformats(folder):
    net = parse_network("network n source\nin %x: f32[1,64,9,9]\nconst %w: f32[64,64,3,3] = seed(1)\n%y: f32[1,64,7,7] = Conv(%x, %w)\nout %y\n")
    whet.build(net, optimization_level=2, timing_cache="").save(folder / "s.engine")  # row-major rows of 9 values: kernels read pixels' channels
    done = call("passes", folder / "s.engine", "--dump", folder / "e", "--json")
    assert done.exit_code == 0, done.output
    (file,) = json.loads(done.output)
    model = onnx.load(file)
    layers = whet.read_engine(folder / "s.engine").network.layers
    assert [n.name for n in model.graph.node] == [x.name for x in layers]
    reformats = [n for n in model.graph.node if n.op_type == "Reformat"]
    assert len(reformats) == sum(x.op == "Reformat" for x in layers) > 0
    assert all(a.s for n in reformats for a in n.attribute)


def test_layers_that_onnx_lacks_are_nodes_of_whets_domain(tmp_path):
    net = parse_network("network n lowered\nin %x: f32[2,8]\nconst %s: f32[8] = seed(1)\n%y = RMSNormalization(%x, %s)\nout %y\n")  # opset 23
    DiagramFolder(tmp_path).save(net, "n")
    (node,) = onnx.load(tmp_path / "n.onnx").graph.node
    assert (node.op_type, node.domain, len(node.input)) == ("RMSNormalization", DOMAIN, 2)
    assert "epsilon" in {a.name for a in node.attribute}


@pytest.mark.parametrize("arguments", [["m.onnx"], ["--dump=d"]])
def test_a_model_and_a_folder_belong_together(arguments):
    assert "both a model" in str(call("passes", *arguments).exception)
