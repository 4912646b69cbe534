"""A job in a child process: `python -m whet.search.jobs.child FOLDER`. It exits with its parent; a crash costs this candidate only.

The parent holds the write end of the child's standard input: when the parent exits for any reason, the child reads end-of-file and exits.
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
from whet.search.jobs.device_locks import hold_file_lock


def main(argv: list[str]) -> int:
    """Runs the job in the folder and writes result.json, also on failure."""
    folder = Path(argv[0]).resolve()
    if "--watch" in argv:
        threading.Thread(target=wait_for_end_of_parent, daemon=True).start()
    with hold_file_lock(folder / j.LOCK):  # held by an orphaned child that is still exiting
        job = j.Job.read(folder)
        for leftover in folder.iterdir():
            if leftover.is_file() and leftover.name not in (j.JOB, j.LOG, j.LOCK) and leftover.suffix != j.CHECKPOINT:
                leftover.unlink()
        where = job.recipe.get("folder", ".")
        if os.path.isdir(where):
            os.chdir(where)
            sys.path.insert(0, where)
        try:
            from whet.search.jobs.work import run_job

            result = run_job(job, folder)
        except WhetError as e:
            result = j.make_failed_result(vars(job), f"{type(e).__name__}: {e}")
        except MemoryError:
            result = j.make_failed_result(vars(job), "out of memory")
        except Exception as e:  # noqa: BLE001 - a user's metric or data function may raise anything; the trial fails with that message
            traceback.print_exc()
            result = j.make_failed_result(vars(job), f"{type(e).__name__}: {e} (full log: {folder / j.LOG})")
        j.write_result(folder, result)
        if result["state"] == "done":
            for checkpoint in folder.glob(f"*{j.CHECKPOINT}"):
                checkpoint.unlink()
    return 0


def wait_for_end_of_parent() -> None:
    """Ends this process when its parent has ended, which closes the pipe to standard input."""
    while os.read(0, 4096):
        pass
    if os.getpgrp() == os.getpid():  # group leader: child processes end with it
        os.killpg(0, signal.SIGKILL)
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
