"""Calibration caches with one missing or wrong value: refused, or read as written; no other exception escapes."""

import json

import numpy as np

from support.damage import damaged
from whet.errors import CalibrationError
from whet.network import parse_network
from whet.precision import calibrate, quantize, read_cache, write_cache

NET = """network n source
in %x: f32[N,3,4,4]
const %w: f32[4,3,1,1] = seed(1)
const %v: f32[2,4,1,1] = seed(2)
%a: f32[N,4,4,4] = Conv(%x, %w)
%b: f32[N,4,4,4] = Relu(%a)
%y: f32[N,2,4,4] = Conv(%b, %v)
out %y
"""


def test_caches(tmp_path):
    net, path, refused = parse_network(NET), tmp_path / "c.json", []
    rng = np.random.default_rng(0)
    ranges = calibrate(net, [{"x": rng.standard_normal((1, 3, 4, 4)).astype(np.float32)} for _ in range(3)])
    ranges.scalings["b"], ranges.corrections["a"] = np.ones(4, np.float32), np.zeros(4, np.float32)
    write_cache(path, ranges)
    document = json.loads(path.read_text())
    for what, data in damaged(document):
        path.write_text(json.dumps(data))
        try:
            quantize(net, read_cache(path, net))
        except CalibrationError:
            refused.append(what)
    assert {"tensors/x/low = None", "tensors/x dropped", "samples = 'x'", "scalings/b = 'x'", "whet_calibration = 3"} <= set(refused)
