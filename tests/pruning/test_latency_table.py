"""The latency table's files: kept, merged and refused rows."""

import json
from dataclasses import asdict, replace

import pytest

from whet.errors import CacheError
from whet.pruning import latency_table
from whet.pruning.latency_table import FORMAT, VERSION, LatencyTable, Row, compute_row_key

ROW = Row("cpu", "fp32", "warm", "Conv(x)", "cpu/some", 2.0, 0.25)
BUSY = replace(ROW, ms=3.0, others=0.5)


def test_keys_depend_on_everything_in_its_order():
    words = ("device", "tactics", "fp32", "warm", "Conv(x)")
    keys = {compute_row_key(*words), compute_row_key(*words[::-1]), *(compute_row_key(*words[:i], "other", *words[i + 1 :]) for i in range(5))}
    assert len(keys) == 7
    assert compute_row_key(*words) == compute_row_key(*words)


def test_rows_are_counted_marked_and_stored(tmp_path):
    path = tmp_path / "t.json"
    table = LatencyTable(path)
    assert (table.save_interval_s, table.added, table.busy, table.rows, table.get("a")) == (2.0, 0, 0, {}, None)
    table.put("b", ROW)
    table.put("a", replace(ROW, ms=1.0))
    assert table.added == 2
    assert table.get("b") is ROW
    assert table.busy == 0
    table.mark("b", 0.5)
    assert table.busy == 1
    assert table.get("b") == replace(ROW, others=0.5)
    assert table.added == 2
    table.save()
    data = json.loads(path.read_text())
    assert (data["format"], data["version"], list(data["rows"])) == (FORMAT, VERSION, ["a", "b"])
    assert data["rows"]["b"] == asdict(replace(ROW, others=0.5))
    assert LatencyTable(path).rows == table.rows
    assert LatencyTable().path is None
    LatencyTable().save()  # nothing to write to


def test_a_file_is_written_if_it_is_missing_or_rows_are_new(tmp_path):
    path = tmp_path / "t.json"
    table = LatencyTable(path)
    table.save()
    assert json.loads(path.read_text())["rows"] == {}
    path.write_text(path.read_text() + " ")
    table.save()
    assert path.read_text().endswith(" "), "nothing is new: the file stays"
    table.put("a", ROW)
    table.save()
    assert LatencyTable(path).rows == {"a": ROW}
    path.write_text(path.read_text() + " ")
    table.save()
    assert path.read_text().endswith(" "), "the rows have been written"
    table.mark("a", 1.5)
    table.save()
    assert LatencyTable(path).rows == {"a": replace(ROW, others=1.5)}


def test_rows_are_saved_when_the_interval_has_passed(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(latency_table.time, "monotonic", lambda: now[0])
    path = tmp_path / "t.json"
    table = LatencyTable(path, save_interval_s=5.0)
    table.put("a", ROW)
    now[0] = 105.0
    table.put("b", ROW)
    assert not path.exists(), "five seconds are not more than five seconds"
    now[0] = 105.5
    table.put("c", ROW)
    assert sorted(LatencyTable(path).rows) == ["a", "b", "c"]
    now[0] = 110.0
    table.put("d", ROW)
    assert "d" not in LatencyTable(path).rows, "the interval begins again at each save"
    now[0] = 111.0
    table.put("e", ROW)
    assert "e" in LatencyTable(path).rows


def test_rows_of_a_quiet_machine_replace_those_of_a_busy_one(tmp_path):
    other = LatencyTable(tmp_path / "other.json")
    for key, row in {"new": ROW, "new busy": BUSY, "quieter": ROW, "busier": BUSY, "both busy": BUSY, "both quiet": ROW}.items():
        other.put(key, row)
    other.save()
    own = {"quieter": replace(BUSY, ms=9.0), "busier": replace(ROW, ms=9.0), "both busy": replace(BUSY, ms=9.0), "both quiet": replace(ROW, ms=9.0)}
    table = LatencyTable()
    table.rows |= own
    assert table.take(tmp_path / "other.json") == 3
    assert table.rows == {**own, "new": ROW, "new busy": BUSY, "quieter": ROW}
    assert table.take(tmp_path / "other.json") == 0
    written = LatencyTable(tmp_path / "w.json")
    (tmp_path / "w.json").write_text((tmp_path / "other.json").read_text())  # by another process
    written.rows |= own
    written.put("more", ROW)
    written.save()
    assert LatencyTable(tmp_path / "w.json").rows == {**own, "more": ROW, "new": ROW, "new busy": BUSY, "quieter": ROW}


def test_rows_that_were_taken_are_saved(tmp_path):
    other = LatencyTable(tmp_path / "other.json")
    other.put("a", ROW)
    other.save()
    table = LatencyTable(tmp_path / "own.json")
    table.save()
    table.take(tmp_path / "other.json")
    table.save()
    assert LatencyTable(tmp_path / "own.json").rows == {"a": ROW}


def test_version_1_is_read(tmp_path):
    row = asdict(ROW)
    del row["others"]
    (tmp_path / "t.json").write_text(json.dumps({"format": FORMAT, "version": 1, "rows": {"a": row}}))
    assert LatencyTable(tmp_path / "t.json").rows == {"a": ROW}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "not a latency table"),
        ({"version": 3}, "version 3, this whet writes version 2"),
        ({"version": 0}, "version 0, this whet"),
        ({"rows": []}, "damaged row"),
        ({"rows": {"a": {**asdict(ROW), "more": 1}}}, "damaged row"),
        ({"rows": {"a": {"ms": 1.0}}}, "damaged row"),
        *(
            ({"rows": {"a": {**asdict(ROW), k: 5}}}, "a text field is not a string")
            for k in ("device", "precisions", "conditions", "layer", "tactic")
        ),
        *(({"rows": {"a": {**asdict(ROW), k: v}}}, "not a finite number >= 0") for k in ("ms", "spread_ms", "others") for v in (-0.1, "1", 1e999)),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, text):
    data = {"format": FORMAT, "version": VERSION, "rows": {"a": asdict(ROW)}, **change}
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(CacheError, match=text):
        LatencyTable(tmp_path / "t.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1]", "5"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(CacheError, match=r"not valid JSON|not a latency table"):
        LatencyTable().take(tmp_path / "t.json")


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(CacheError, match=r"cannot read the latency table .*missing"):
        LatencyTable().take(tmp_path / "missing.json")
    table = LatencyTable(tmp_path / "no" / "t.json")
    table.put("a", ROW)
    with pytest.raises(CacheError, match=r"cannot write the latency table .*t\.json"):
        table.save()
    zero = {**asdict(ROW), "ms": 0, "spread_ms": 0}
    (tmp_path / "zero.json").write_text(json.dumps({"format": FORMAT, "version": VERSION, "rows": {"a": zero}}))
    assert LatencyTable(tmp_path / "zero.json").rows["a"].ms == 0
