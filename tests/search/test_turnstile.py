"""Work that shares a device does not starve a waiting timing."""

import fcntl
import threading
import time

from whet.search.jobs.device_locks import DeviceLock, hold_file_lock


def test_a_waiting_timing_precedes_later_work(tmp_path):
    lock, order = DeviceLock("cpu", tmp_path), []

    def enter(how: str) -> threading.Thread:
        def run():
            with getattr(lock, how)():
                order.append(how)

        t = threading.Thread(target=run, daemon=True)
        t.start()
        return t

    def somebody_waits() -> bool:
        with hold_file_lock(tmp_path / "cpu.turn", fcntl.LOCK_EX | fcntl.LOCK_NB) as free:
            return not free

    with lock.hold_for_work():
        timing = enter("timing")
        end = time.monotonic() + 60
        while not somebody_waits():
            assert time.monotonic() < end, "the timing never requested the lock"
            time.sleep(0.005)
        later = enter("hold_for_work")
        later.join(0.2)
        assert order == [], "work could share the lock, but a timing requested it earlier"
    for t in (timing, later):
        t.join(60)
    assert order == ["timing", "hold_for_work"]
