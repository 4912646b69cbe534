"""Recipes and latency tables with one missing or wrong value: refused, or read as written; no other exception escapes."""

import json

from support.damage import damaged
from whet.errors import CacheError, PruneError
from whet.network import parse_network
from whet.pruning import apply_recipe, load_recipe, make_pruning_recipe
from whet.pruning.latency_table import LatencyTable, Row

NET = """network n source
in %x: f32[N,3,8,8]
const %w1: f32[8,3,3,3] = seed(1)
const %w2: f32[4,8,1,1] = seed(2)
%a: f32[N,8,6,6] = Conv(%x, %w1)
%y: f32[N,4,6,6] = Conv(%a, %w2)
out %y
"""


def test_recipes(tmp_path):
    net, path, refused = parse_network(NET), tmp_path / "r.json", []
    document = make_pruning_recipe(net, {"w1": [0, 1, 2, 3]}, about={"ratio": 0.5}).to_json()
    for what, data in damaged(document):
        path.write_text(json.dumps(data))
        try:
            made = apply_recipe(net, load_recipe(path))
        except PruneError:
            refused.append(what)
        else:
            assert made.outputs[0].type == net.outputs[0].type, what
    assert {"groups = 3", "groups dropped", "version dropped", "groups/0/kept = [[1]]", "groups/0/size dropped"} - set(refused) == {"groups dropped"}


def test_latency_tables(tmp_path):
    path, row, refused = tmp_path / "t.json", Row("cpu", "fp32", "warm", "Conv ...", "cpu/conv", 1.0, 0.1), []
    table = LatencyTable(path)
    table.put("k", row)
    table.save()
    for what, data in damaged(json.loads(path.read_text())):
        (other := tmp_path / "o.json").write_text(json.dumps(data))
        try:
            read = LatencyTable(other)
            for r in read.rows.values():
                assert r.ms + r.spread_ms < float("inf"), what
                assert isinstance(r.device + r.precisions + r.conditions + r.layer + r.tactic, str)
            read.put("j", row)
            read.save()
        except CacheError:
            refused.append(what)
    assert {"rows = []", "rows/k/ms = None", "rows/k/ms = nan", "rows/k/spread_ms = 'x'", "rows/k/device = 3", "rows/k/layer dropped"} <= set(refused)
