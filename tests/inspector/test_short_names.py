"""Short names of layers: tables of `whet explain` have one line of at most 100 columns a layer, and the names that they show are accepted."""

import pytest
from click.testing import CliRunner

from whet import zoo
from whet.builder import BuildConfig, build
from whet.cli.explain import command
from whet.engine import write_engine
from whet.errors import UsageError
from whet.frontends import network_from_onnx
from whet.inspector import find_layer, layer_facts
from whet.inspector.summary import COLUMNS, is_short_name, make_layer_table, shorten_cells, shorten_name


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("short") / "s.onnx"
    zoo.save("squeezenet1_1", path, batch=1, image=64)
    return build(network_from_onnx(path), BuildConfig(backend="null", verify=False))


@pytest.fixture(scope="module")
def engine(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("short") / "s.engine"
    write_engine(plan, path)
    return str(path)


def test_explain_prints_a_layer_per_line_in_100_columns(plan, engine, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist may set a narrower terminal
    done = CliRunner().invoke(command, [engine, "--layers"], catch_exceptions=False)
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 100
    table = lines[next(i for i, line in enumerate(lines) if line.strip() == "Layers") + 2 :]
    assert len(table) == len(plan.network.layers)


def test_the_shown_names_are_accepted(plan, engine, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    facts = layer_facts(plan)
    shown = [row[COLUMNS.index("layer")] for row in make_layer_table(facts, 0.0)]
    assert any(" +" in name for name in shown)
    for f, name in zip(facts, shown, strict=True):
        if sum(is_short_name(name, g.name) for g in facts) == 1:
            assert find_layer(facts, name) is f
    first = next(name for name in shown if " +" in name)
    done = CliRunner().invoke(command, [engine, first], catch_exceptions=False)
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 100


def test_a_short_name_of_several_layers_is_refused(plan):
    facts = layer_facts(plan)
    name = f"{facts[0].name[0]}…"
    if sum(is_short_name(name, f.name) for f in facts) < 2:
        name = "…" + shorten_name(facts[0].name, 99)[-1]
    with pytest.raises(UsageError, match=r"is short for \d+ layers"):
        find_layer(facts, name)


def test_long_cells_are_shortened_to_the_width():
    row = ["0.1234", "12.3%", "/a/very/long/module/path/that/goes/on/conv1/Conv + /relu/Relu", "f32", "cpu/" + "t" * 40, "k" * 60, "memory"]
    (fitted,) = shorten_cells(COLUMNS, [row])
    assert len("  ".join(fitted)) <= 100
    assert fitted[2].endswith("Conv +1")
    assert is_short_name(fitted[2], row[2])
    assert not is_short_name(fitted[2], "/other/Conv + /relu/Relu")
