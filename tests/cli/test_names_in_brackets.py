"""Names are printed literally: PyTorch's exporters and users write brackets, which a terminal library may interpret as markup."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet.builder import build
from whet.builder.config import BuildConfig
from whet.cli import explain, run
from whet.engine import write_engine
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network, parse_type

CONV, HEAD = "blocks[0]/conv[/b]", "head[bold]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(2)
    net = Network("net[red]")
    x = net.add_input("x", parse_type("f32[1,3,8,8]"))
    a = net.add("Conv", x, net.constant(rng.standard_normal((8, 3, 3, 3)).astype(np.float32) / 5, "w[1]"), name=CONV)
    b = net.add("Flatten", net.add("GlobalAveragePool", a, name="pool"), name="flat")
    net.mark_output(net.add("Gemm", b, net.constant(rng.standard_normal((8, 5)).astype(np.float32), "w[2]"), name=HEAD), "y[/]")
    made = tmp_path_factory.mktemp("brackets")
    save_onnx(net, made / "a.onnx")
    plan = build(network_from_onnx(made / "a.onnx"), BuildConfig(optimization_level=0, timing_cache=""))
    plan.report.notes = ["pip install 'whet[jit]' for its own kernels"]
    write_engine(plan, made / "a.engine")
    return made


def run_command(command, *args, code=0):
    got = CliRunner().invoke(command, [str(a) for a in args], env={"COLUMNS": "200"})
    assert got.exit_code == code, got.output
    return got.output


def test_an_engine_is_explained(folder):
    text = run_command(explain.command, folder / "a.engine")
    assert "net[red] on cpu" in text
    assert "note pip install 'whet[jit]' for its own kernels" in text
    assert CONV in text
    assert HEAD in text


def test_a_layer_is_explained(folder):
    named = [r["layer"] for r in json.loads(run_command(explain.command, folder / "a.engine", "--layers", "--json"))["layer_table"]]
    for name in (CONV, HEAD):
        layer = next(n for n in named if name in n and not n.endswith("reformat"))  # a CPU may need a reformat layer as well
        text = run_command(explain.command, folder / "a.engine", layer)
        assert text.startswith(layer)
        assert f"from {name}" in text


def test_a_run_names_the_differing_value(folder):
    pytest.importorskip("onnxruntime")
    text = run_command(run.command, folder / "a.onnx", "--against", "onnxruntime", "--tolerance", "1e-12", "--all", code=1)
    assert "computed by" in text
    assert "y[/]" in text
    assert "MISMATCH: an output differs" in text


def test_strings_and_styles_of_a_console():
    from whet.cli._console import make_console, style_text

    out = make_console()
    out.file = io.StringIO()
    out.print("a[/b] 'whet[jit]' python:m:f")
    out.print(style_text(("net[red]", "bold"), " on [cpu]"))
    assert out.file.getvalue() == "a[/b] 'whet[jit]' python:m:f\nnet[red] on [cpu]\n"
