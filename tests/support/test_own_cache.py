"""Each test process has a cache folder of its own; compiled kernels and other programs' caches are shared."""

import json
import os
import subprocess
import sys
from pathlib import Path

from whet.measure.timing_cache import get_default_path

TESTS = Path(__file__).parents[1]
SHOW = "import json, os, sys\nfrom support.own_cache import use_own_cache\nown = use_own_cache()\n"
SHOW += "print(json.dumps({'own': str(own), 'seen': sorted(os.listdir(own)), **{k: os.environ.get(k) for k in sys.argv[1:]}}))\n"
VARIABLES = ("XDG_CACHE_HOME", "WHET_CPU_CACHE", "WHET_CUDA_CACHE", "PIP_CACHE_DIR")


def show(environment):
    done = subprocess.run([sys.executable, "-c", SHOW, *VARIABLES], capture_output=True, text=True, check=True, env=environment, cwd=TESTS)
    return json.loads(done.stdout)


def test_this_process_has_a_folder_of_its_own():
    own = Path(os.environ["XDG_CACHE_HOME"])
    assert own.name.startswith("whet-test-cache-")
    assert get_default_path().is_relative_to(own)


def test_processes_share_compiled_kernels_and_nothing_else_of_whet(tmp_path):
    for name in ("whet/objects", "pip", "fonts"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "whet" / "timings-1.sqlite").touch()
    clean = {k: v for k, v in os.environ.items() if k not in (*VARIABLES, "WHET_TESTS_USER_CACHE")}
    first, second = (show({**clean, "XDG_CACHE_HOME": str(tmp_path)}) for _ in range(2))
    assert first["own"] != second["own"]
    for found in (first, second):
        assert found["XDG_CACHE_HOME"] == found["own"] != str(tmp_path)
        assert found["seen"] == ["fonts", "pip"]
        assert not Path(found["own"]).exists(), "the folder is deleted at the end"
        assert found["WHET_CPU_CACHE"] == str(tmp_path / "whet" / "objects")
        assert found["WHET_CUDA_CACHE"] == str(tmp_path / "whet" / "cubins")
        assert found["PIP_CACHE_DIR"] == str(tmp_path / "pip")
    assert (tmp_path / "whet" / "timings-1.sqlite").exists()
    worker = show({**clean, **{k: first[k] for k in VARIABLES}, "WHET_TESTS_USER_CACHE": str(tmp_path)})
    assert worker["seen"] == ["fonts", "pip"], "a process that a test process starts links to the user's folder"
    assert worker["WHET_CPU_CACHE"] == first["WHET_CPU_CACHE"]
    own = show({**clean, "XDG_CACHE_HOME": str(tmp_path), "WHET_CPU_CACHE": "elsewhere"})
    assert own["WHET_CPU_CACHE"] == "elsewhere"
