"""A cache folder of its own for each test process, and for the processes that it starts: no test sees timings, locks or records of another process.

Compiled kernels are shared (WHET_CPU_CACHE, WHET_CUDA_CACHE): their names are digests of what they are compiled from. The caches of other programs
are links to those of the user: pip's downloads, the browser's, the fonts of matplotlib.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED = "WHET_TESTS_USER_CACHE"  # the user's cache folder, for the processes that a test process starts
_COMPILED = (("WHET_CPU_CACHE", "objects"), ("WHET_CUDA_CACHE", "cubins"))


def use_own_cache() -> Path:
    """Makes a new folder the cache folder of this process and of those that it starts; it is deleted when this process ends.

    To be called before whet is imported.
    """
    user = Path(os.environ.setdefault(_SHARED, os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")))
    own, process = Path(tempfile.mkdtemp(prefix="whet-test-cache-")), os.getpid()
    for variable, name in _COMPILED:
        os.environ.setdefault(variable, str(user / "whet" / name))
    os.environ.setdefault("PIP_CACHE_DIR", str(user / "pip"))  # also where it does not exist yet
    with suppress(OSError):
        for entry in user.iterdir():
            if entry.name != "whet":
                (own / entry.name).symlink_to(entry)
    os.environ["XDG_CACHE_HOME"] = str(own)
    atexit.register(_remove, own, process)
    return own


def _remove(folder: Path, process: int) -> None:
    """Deletes the folder of this process; a forked process leaves that of its parent alone."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
