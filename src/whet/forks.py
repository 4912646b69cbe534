"""Locks and fork(): a thread of the parent may hold a lock at the moment of the fork, and no thread of the child would ever release it.

A lock that guards whet's own objects is renewed in the child (`make_lock`). A lock that guards the state of a native library cannot be renewed: the
thread that forks holds it, so that fork() waits until no other thread is inside the library (`make_lock_held_during_fork`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_locks: WeakSet[Any] = WeakSet()
_held_during_fork: list[Any] = []
#: the number of forks between this process and the one that imported whet: another number means another process. Faster than os.getpid()
generation = 0


def make_lock() -> threading.Lock:
    """A lock that is free in the child after fork(), even if a thread that does not exist there held it."""
    return _register_lock(threading.Lock())


def make_reentrant_lock() -> Any:
    """The same, reentrant."""
    return _register_lock(threading.RLock())


def make_lock_held_during_fork() -> Any:
    """A reentrant lock that fork() acquires first and releases afterwards, in the parent and in the child.

    For calls into native libraries with locks of their own. A thread that holds one must not wait for another one: fork() acquires all of them.
    """
    lock = threading.RLock()
    _held_during_fork.append(lock)
    return lock


class cached_property(functools.cached_property[T], Generic[T]):
    """functools.cached_property; its lock (Python 3.11 and older have one per property) is free in the child."""

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        if hasattr(self, "lock"):
            _register_lock(self.lock)


def _register_lock(lock: Any) -> Any:
    _locks.add(lock)
    return lock


def _renew_in_child() -> None:
    global generation
    generation += 1
    for lock in list(_locks):
        lock._at_fork_reinit()  # the method that CPython's own modules use, such as logging and concurrent.futures


def _acquire_before_fork() -> None:
    for lock in _held_during_fork:
        lock.acquire()


def _release_after_fork() -> None:
    for lock in reversed(_held_during_fork):
        lock.release()


os.register_at_fork(after_in_child=_renew_in_child)
os.register_at_fork(before=_acquire_before_fork, after_in_parent=_release_after_fork, after_in_child=_release_after_fork)
