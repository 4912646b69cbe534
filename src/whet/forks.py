"""State that must be renewed in a child process of fork(): a thread of the parent may have held a lock at the moment of the fork."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()
_generation = 0


def new_lock() -> threading.Lock:
    """A lock that is free in the child after fork(), even if a thread that does not exist there held it."""
    return _registered(threading.Lock())


def new_reentrant_lock() -> Any:
    """The same, reentrant."""
    return _registered(threading.RLock())


def _registered(lock: Any) -> Any:
    _locks.add(lock)
    return lock


def generation() -> int:
    """The number of forks between this process and the one that imported whet: another number means another process. Faster than os.getpid()."""
    return _generation


def _renew_in_child() -> None:
    global _generation
    _generation += 1
    for lock in list(_locks):
        lock._at_fork_reinit()  # the method that CPython's own modules use, such as logging and concurrent.futures


os.register_at_fork(after_in_child=_renew_in_child)
