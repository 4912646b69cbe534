"""Files that users keep name the version of their format. A version is changed on purpose only: a whet of another version refuses such files."""

import json
import sqlite3
import struct

from handmade import conv_net, make_plan
from whet.engine import engine_bytes
from whet.measure.timing_cache import TimingCache
from whet.precision.cache import write_cache
from whet.precision.ranges import Range, Ranges


def test_a_timing_cache_is_of_version_1(tmp_path):
    TimingCache(tmp_path / "t.sqlite").close()
    db = sqlite3.connect(tmp_path / "t.sqlite")
    found = dict(db.execute("SELECT name, value FROM about"))
    db.close()
    assert found["version"] == "1"


def test_a_calibration_cache_is_of_version_1(tmp_path):
    write_cache(tmp_path / "c.json", Ranges({"x": Range(-1.0, 1.0, "max")}))
    assert json.loads((tmp_path / "c.json").read_text())["whet_calibration"] == 1


def test_an_engine_is_of_version_4_and_its_text_of_version_2():
    data = bytes(engine_bytes(make_plan(conv_net())))
    assert struct.unpack_from("<8xI", data) == (4,)
    assert b'"text_version":2' in data.replace(b" ", b"")
