"""The number of BLAS threads during verification, judged by threadpoolctl; in a process of its own, since the number belongs to the process."""

import subprocess
import sys

import pytest

pytest.importorskip("threadpoolctl")

SCRIPT = """
from threadpoolctl import threadpool_info
import numpy as np
from whet.builder.verify.blas_threads import limit_blas_threads

def threads():
    return [p["num_threads"] for p in threadpool_info() if p["internal_api"] == "openblas"]

if not threads():
    print("none")
else:
    before = threads()
    with limit_blas_threads(2):
        inside = threads()
        try:
            with limit_blas_threads(1):
                nested = threads()
                raise ValueError
        except ValueError:
            after_error = threads()
    print(before, inside, nested, after_error, threads())
"""


def test_the_number_is_set_within_the_block_and_restored_after_it(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.strip()
    if said == "none":
        pytest.skip("NumPy uses another BLAS than OpenBLAS")
    assert said == "[1] [2] [1] [2] [1]"
