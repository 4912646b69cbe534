"""A job in a process of its own: `python -m whet.search.jobs.child FOLDER`. It dies with its parent; a crash costs this candidate and nothing else.

The parent holds the other end of standard input: when the parent is gone, however it went, reading it ends, and so does this process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from whet.errors import WhetError
from whet.search.jobs import job as j
from whet.search.jobs.device_locks import file_lock


def main(argv: list[str]) -> int:
    """Runs the job in the folder and leaves result.json, also when it fails."""
    folder = Path(argv[0]).resolve()
    if "--watch" in argv:
        threading.Thread(target=_until_parent_dies, daemon=True).start()
    with file_lock(folder / j.LOCK):  # one that lost its parent and is still dying holds this
        todo = j.Job.read(folder)
        for leftover in folder.iterdir():
            if leftover.is_file() and leftover.name not in (j.JOB, j.LOG, j.LOCK) and leftover.suffix != j.CHECKPOINT:
                leftover.unlink()
        where = todo.recipe.get("folder", ".")
        if os.path.isdir(where):
            os.chdir(where)
            sys.path.insert(0, where)
        try:
            from whet.search.jobs.work import run_job

            found = run_job(todo, folder)
        except WhetError as e:
            found = j.failed(vars(todo), f"{type(e).__name__}: {e}")
        except MemoryError:
            found = j.failed(vars(todo), "out of memory")
        except Exception as e:  # noqa: BLE001 - a user's metric or data function may raise anything; the trial fails with its words
            traceback.print_exc()
            found = j.failed(vars(todo), f"{type(e).__name__}: {e} (the whole story is in {folder / j.LOG})")
        j.sealed(folder, found)
        if found["state"] == "done":
            for checkpoint in folder.glob(f"*{j.CHECKPOINT}"):
                checkpoint.unlink()
    return 0


def _until_parent_dies() -> None:
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getpid():  # this process leads: what it has begun ends with it
        os.killpg(0, signal.SIGKILL)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
