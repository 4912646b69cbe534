"""The timing cache: stored on disk, shared by processes, refused when damaged."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "builder"))
from nets import residual

from whet.builder import BuildConfig, build
from whet.errors import CacheError
from whet.measure.timing_cache import Timed, TimingCache

SRC = Path(__file__).parents[2] / "src"

WRITER = """
import sys
from whet.builder import BuildConfig, build
from whet.measure.timing_cache import Timed, TimingCache
path, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with TimingCache(path) as cache:
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(count):
        cache.put(f"{who}-{i}", Timed(float(i), 0.5, 8), {"who": who})
        cache.put(f"both-{i}", Timed(float(i), 0.25, 8), {"who": who})
"""


def test_results_are_persistent(tmp_path):
    with TimingCache(tmp_path / "t.sqlite") as cache:
        assert cache.get("k") is None
        cache.put("k", Timed(1.5, 0.1, 8), {"layer": "conv"})
    with TimingCache(tmp_path / "t.sqlite") as cache:
        assert cache.get("k") == Timed(1.5, 0.1, 8)
        assert (cache.hits, cache.misses) == (1, 0)


def test_an_empty_path_stores_nothing(tmp_path):
    cache = TimingCache("")
    cache.put("k", Timed(1.0, 0.0, 1), {})
    assert cache.get("k") == Timed(1.0, 0.0, 1)
    assert TimingCache("").get("k") is None


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path):
    path, count = tmp_path / "t.sqlite", 150
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), who, str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SRC), "PATH": ""},
        )
        for who in ("a", "b")
    ]  # fmt: skip
    for w in writers:
        assert w.stdout.readline() == "ready\n"
    for w in writers:
        w.stdin.write("go\n")
        w.stdin.flush()
    for w in writers:
        w.communicate(timeout=60)
        assert w.returncode == 0
    with TimingCache(path) as cache:
        assert len(cache) == 3 * count
        for i in range(count):
            assert cache.get(f"a-{i}") == cache.get(f"b-{i}") == Timed(float(i), 0.5, 8)
            assert cache.get(f"both-{i}") == Timed(float(i), 0.25, 8)


def test_results_of_a_killed_writer_are_kept(tmp_path):
    path = tmp_path / "t.sqlite"
    code = WRITER + "\nprint('put', flush=True)\nimport time; time.sleep(60)\n"
    w = subprocess.Popen(
        [sys.executable, "-c", code, str(path), "a", "3"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SRC), "PATH": ""},
    )  # fmt: skip
    assert w.stdout.readline() == "ready\n"
    w.stdin.write("go\n")
    w.stdin.flush()
    assert w.stdout.readline() == "put\n"
    w.kill()
    w.communicate()
    with TimingCache(path) as cache:
        assert len(cache) == 6


@pytest.mark.parametrize("content", [b"", b"not a database, only text" * 100])
def test_a_damaged_file_is_refused_or_treated_as_empty(tmp_path, content):
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)
    if not content:
        with TimingCache(path) as cache:
            assert len(cache) == 0
        return
    with pytest.raises(CacheError, match="Delete it, name another with timing_cache="):
        TimingCache(path)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.sqlite"
    TimingCache(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE about SET value = '99'")
    db.commit()
    db.close()
    with pytest.raises(CacheError, match="version 99"):
        TimingCache(path)


@pytest.mark.parametrize("change", [
    "ms = 'fast'", "ms = -0.5", "ms = 1e999", "spread_ms = -0.5", "spread_ms = 1e999", "spread_ms = 'x'", "samples = 'many'",
])  # fmt: skip
def test_invalid_rows_are_misses(tmp_path, change):
    path = tmp_path / "t.sqlite"
    with TimingCache(path) as cache:
        cache.put("k", Timed(1.0, 0.0, 1), {})
    with TimingCache(path) as cache:
        assert cache.get("k") == Timed(1.0, 0.0, 1)
    db = sqlite3.connect(path)
    db.execute(f"UPDATE timings SET {change}")
    db.commit()
    db.close()
    with TimingCache(path) as cache:
        assert cache.get("k") is None


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be used"):
        TimingCache(tmp_path / "file" / "t.sqlite")


def test_a_full_disk_is_named_as_such(tmp_path):
    with TimingCache(tmp_path / "t.sqlite") as cache:
        assert cache.database is not None
        pages = cache.database.execute("PRAGMA page_count").fetchone()[0]
        cache.database.execute(f"PRAGMA max_page_count = {pages}")

        def fill() -> None:
            with cache.transaction():
                for i in range(2000):
                    cache.put(f"key-{i}" * 20, Timed(1.0, 0.1, 8), {})

        with pytest.raises(CacheError, match="disk is full"):
            fill()


@pytest.fixture
def read_only_home(tmp_path, monkeypatch):
    """The default cache is below a plain file, so its folder cannot be created."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("whet.measure.timing_cache.get_default_path", lambda: tmp_path / "file" / "t.sqlite")


def test_an_unusable_default_cache_is_abandoned_with_a_note(read_only_home):
    """As in a container with a read-only home: the user did not request the file."""
    said: list[str] = []
    with TimingCache(None, said.append) as cache, cache.transaction():
        cache.put("k", Timed(1.0, 0.1, 8), {})
        assert cache.get("k") == Timed(1.0, 0.1, 8)
    assert len(said) == 1
    assert "not kept" in said[0]
    with pytest.raises(CacheError, match="cannot be used"):
        TimingCache(None)


def test_a_default_cache_on_a_full_disk_is_abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr("whet.measure.timing_cache.get_default_path", lambda: tmp_path / "t.sqlite")
    said: list[str] = []
    with TimingCache(None, said.append) as cache:
        assert cache.database is not None
        cache.database.execute(f"PRAGMA max_page_count = {cache.database.execute('PRAGMA page_count').fetchone()[0]}")
        with cache.transaction():
            for i in range(2000):
                cache.put(f"key-{i}" * 20, Timed(1.0, 0.1, 8), {})
        assert cache.get("key-1999" * 20) == Timed(1.0, 0.1, 8)
    assert len(said) == 1
    assert "disk is full" in said[0]


def test_a_build_continues_without_its_default_cache(read_only_home):
    plan = build(residual(), BuildConfig(optimization_level=1, avg_timing=1, whole_engines=1))
    assert sum("timing cache" in n for n in plan.report.notes) == 1


@pytest.mark.parametrize(
    ("statements", "named"),
    [
        (["CREATE VIEW timings AS WITH RECURSIVE n(k) AS (SELECT 1 UNION ALL SELECT k FROM n) SELECT k AS key FROM n"], "the view 'timings'"),
        (["CREATE TABLE timings (key TEXT PRIMARY KEY, ms REAL AS (1.0))"], "the table 'timings'"),
        (["CREATE TABLE t (x)", "CREATE TRIGGER loop AFTER INSERT ON t BEGIN DELETE FROM t; END"], "the table 't'"),
    ],
    ids=["view", "columns", "trigger"],
)
def test_a_file_with_tables_or_queries_of_others_is_refused(tmp_path, statements, named):
    """Reading the view would never end."""
    path = tmp_path / "cache.db"
    db = sqlite3.connect(path)
    for s in statements:
        db.execute(s)
    db.commit()
    db.close()
    with pytest.raises(CacheError, match=f"it holds {named}, which whet does not write"):
        TimingCache(path).get("k")


def test_text_that_is_not_utf8_is_refused_as_another_version(tmp_path):
    path = tmp_path / "cache.db"
    TimingCache(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE about SET value = CAST(x'ff31' AS TEXT)")
    db.commit()
    db.close()
    with pytest.raises(CacheError, match="it is of version"):
        TimingCache(path)
