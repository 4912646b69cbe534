"""Every subcommand has --json; with it, standard output is one JSON document and messages go to standard error."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from whet import zoo
from whet.cli import group
from whet.cli._exec_flags import FLAGS
from whet.cli.exec import RawCommand


def commands(parent: click.Group, prefix: str = ""):
    """Name and command of every subcommand, and of those of its groups."""
    context = click.Context(parent)
    for name in parent.list_commands(context):
        found = parent.get_command(context, name)
        if isinstance(found, click.Group):
            yield from commands(found, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", found


@pytest.mark.parametrize(("name", "command"), [pytest.param(n, c, id=n) for n, c in commands(group)])
def test_every_subcommand_has_json(name, command):
    flags = [f"--{f}" for f in FLAGS] if isinstance(command, RawCommand) else [o for p in command.params for o in p.opts]
    assert "--json" in flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("json")
    zoo.save("lenet5", made / "lenet.onnx", batch=1)
    return made


def output(*args) -> dict:
    done = CliRunner().invoke(group, [str(a) for a in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def engines(folder):
    for level in (0, 1):
        build = ["--builderOptimizationLevel=" + str(level), "--skipInference", f"--timingCacheFile={folder / 'cache'}"]
        output("exec", f"--onnx={folder / 'lenet.onnx'}", f"--saveEngine={folder / f'{level}.engine'}", *build, "--json")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "zoo list", "passes", "passes lenet.onnx --dump=passes", "check lenet.onnx", "explain 1.engine", "explain 1.engine /conv1/Conv",
        "diff 1.engine 1.engine", "compare 0.engine 1.engine --seconds=0.02", "compare lenet.onnx lenet2.onnx --noEngines",
        "sparsity lenet.onnx --noEngines", "debug precision lenet.onnx --bf16", "report 1.engine", "zoo lenet5 -o another.onnx",
        "exec --loadEngine=1.engine --duration=0 --iterations=2 --splitFusions --dumpProfile",
    ],
)  # fmt: skip
def test_every_table_is_one_json_document(engines, words, monkeypatch):
    if words.startswith("report"):
        pytest.importorskip("plotly")
    monkeypatch.chdir(engines)
    zoo.save("lenet5", engines / "lenet2.onnx", batch=1, seed=2)
    assert output(*words.split(), "--json") != {}


def test_exec_and_retune(folder):
    model, engine, cache = folder / "lenet.onnx", folder / "l.engine", folder / "cache"
    build = ["--builderOptimizationLevel=0", "--duration=0", "--warmUp=0", f"--timingCacheFile={cache}", "--fp8"]
    built = output("exec", f"--onnx={model}", f"--saveEngine={engine}", *build, "--dumpProfile", "--json")
    assert built["engine"] == str(engine)
    assert built["performance"]["queries"] == 10
    assert built["performance"]["ms"]["Latency"]["min"] > 0
    assert len(built["profile"]) == built["layers"]
    assert any("--fp8" in w for w in built["warnings"])
    retuned = output("retune", engine, "--json", f"--timingCacheFile={cache}")
    assert retuned["layers"] == built["layers"]


def test_prune_and_latency_table(folder):
    model = folder / "lenet.onnx"
    table = output("latency-table", model, "--most=2", f"--timingCacheFile={folder / 'cache'}", "--json")
    assert Path(table["table"]).exists()
    assert table["groups"]
    listed = output("prune", model, "--list", "--json")
    assert {g["group"] for g in table["groups"]} == {g["name"] for g in listed["groups"]}
    pruned = output("prune", model, "-o", folder / "small.onnx", "--ratio=0.3", "--json")
    assert pruned["channels"][1] < pruned["channels"][0]
    assert pruned["parameters"][1] < pruned["parameters"][0]
    patterned = output("prune", model, "-o", folder / "zeros.onnx", "--pattern=2:4", "--noEngines", "--json")
    assert patterned["pattern"] == "2:4"
    assert patterned["removed_magnitude"]
