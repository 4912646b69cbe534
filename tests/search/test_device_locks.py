"""Locks of a search: timings alone on their device, fine-tuning alone on a GPU."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from whet.search.jobs.device_locks import DeviceLock, find_physical_gpu

HOLD = r"""
import os, sys, time
from whet.search.jobs.device_locks import DeviceLock
lock = DeviceLock(sys.argv[2], sys.argv[1])
os.write(1, b"asking\n")
with getattr(lock, sys.argv[3])():
    os.write(1, b"held\n")
    time.sleep(600)
"""


def holder(folder: Path, how: str, device: str = "cpu") -> subprocess.Popen:
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), device, how], stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "asking\n"
    assert p.stdout.readline() == "held\n"
    return p


def gets_lock(folder: Path, how: str, device: str = "cpu", within: float = 60.0) -> bool:
    """True if another process gets the lock in `within` seconds of requesting it."""
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), device, how], stdout=subprocess.PIPE, bufsize=0)
    try:
        assert p.stdout.read(len("asking\n")) == b"asking\n"
        ready, _, _ = select.select([p.stdout], [], [], within)
        return bool(ready)
    finally:
        p.kill()
        p.communicate()


def test_timing_is_exclusive_and_a_killed_holder_releases_the_lock(tmp_path):
    p = holder(tmp_path, "timing")
    assert not gets_lock(tmp_path, "timing", within=0.5)
    assert not gets_lock(tmp_path, "hold_for_work", within=0.5)
    assert gets_lock(tmp_path, "timing", "cuda:1")
    p.kill()
    p.communicate()
    with DeviceLock("cpu", tmp_path).timing():
        pass
    p = holder(tmp_path, "hold_for_work")
    assert gets_lock(tmp_path, "hold_for_work")
    assert not gets_lock(tmp_path, "timing", within=0.5)
    p.kill()
    p.communicate()


def test_fine_tuning_is_exclusive_on_a_gpu_and_shared_on_a_cpu(tmp_path):
    p = holder(tmp_path, "training", "cuda:0")
    assert not gets_lock(tmp_path, "timing", "cuda:0", within=0.5)
    assert gets_lock(tmp_path, "hold_for_work", "cuda:0")
    p.kill()
    p.communicate()
    p = holder(tmp_path, "training")
    assert gets_lock(tmp_path, "hold_for_work")
    assert not gets_lock(tmp_path, "timing", within=0.5)
    p.kill()
    p.communicate()


def test_a_gpu_has_one_name_independent_of_the_environment(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_physical_gpu("cpu") is None
    assert find_physical_gpu("cuda:2") == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert [find_physical_gpu(d) for d in ("cuda", "cuda:1")] == ["3", "GPU-abc"]


def test_a_gpu_has_one_lock_for_its_index_and_its_uuid(monkeypatch, tmp_path):
    class NVMLError(Exception):
        pass

    def handle(name):
        if name not in (2, "GPU-abc"):
            raise NVMLError
        return "handle"

    nvml = SimpleNamespace(NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=handle, nvmlDeviceGetHandleByUUID=handle,
                           nvmlDeviceGetUUID=lambda h: "GPU-abc")  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    names = set()
    for visible in ("2", "GPU-abc"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        names.add(DeviceLock("cuda", tmp_path).name)
    assert names == {"cuda-GPU-abc"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert DeviceLock("cuda", tmp_path).name == "cuda-5"
