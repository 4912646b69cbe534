"""The number of BLAS threads during verification, judged by threadpoolctl; in a process of its own, since the number belongs to the process."""

import mmap
import os
import subprocess
import sys

import pytest

from whet.builder.verify import blas_threads

pytest.importorskip("threadpoolctl")

SCRIPT = """
from threadpoolctl import threadpool_info
import numpy as np
from whet.builder.verify.blas_threads import limit_blas_threads

def parse_threads():
    return [p["num_threads"] for p in threadpool_info() if p["internal_api"] == "openblas"]

if not parse_threads():
    print("none")
else:
    before = parse_threads()
    with limit_blas_threads(2):
        inside = parse_threads()
        try:
            with limit_blas_threads(1):
                nested = parse_threads()
                raise ValueError
        except ValueError:
            after_error = parse_threads()
    print(before, inside, nested, after_error, parse_threads())
"""


def test_the_number_is_set_within_the_block_and_restored_after_it(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.strip()
    if said == "none":
        pytest.skip("NumPy uses another BLAS than OpenBLAS")
    assert said == "[1] [2] [1] [2] [1]"


@pytest.mark.parametrize(("before", "set_to"), [(7, [2, 7]), (None, [2])])
def test_the_number_before_is_restored_if_it_is_known(monkeypatch, before, set_to):
    seen = []
    monkeypatch.setattr(blas_threads, "find_thread_functions", lambda: (lambda: before, seen.append))
    with blas_threads.limit_blas_threads(2):
        assert seen == [2]
    assert seen == set_to
    monkeypatch.setattr(blas_threads, "find_thread_functions", lambda: None)
    with blas_threads.limit_blas_threads(2):
        assert seen == set_to


def test_files_whose_names_are_no_utf_8_may_be_mapped(tmp_path):
    """Engine files are mapped, and /proc/self/maps has their names."""
    path = os.fsencode(tmp_path) + b"/net\xff"
    with open(path, "wb") as out:
        out.write(bytes(4096))
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ):
        known = blas_threads.find_thread_functions.__wrapped__()
    assert (known is None) == (blas_threads.find_thread_functions() is None)
