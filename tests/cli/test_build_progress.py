"""A build's progress on the command line: updates of the bar; no Ctrl-C is lost."""

import signal

import pytest

from whet.cli._build_progress import BuildProgress


class Dropped:
    """Is interrupted in its destructor: Python prints that KeyboardInterrupt and continues."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def usual(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler is restored"
    signal.signal(signal.SIGINT, before)


def a_build(interrupted, *steps):
    """A build interrupted by `interrupted`; returns the number of steps completed after it."""
    done = 0
    with BuildProgress(enabled=False) as progress:
        progress.stage("timing", 2)
        interrupted()
        for step in steps:
            progress.step(step)
            done += 1
    return done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("steps", [("a kernel", "another"), ()])
def test_an_interrupt_dropped_by_python_takes_effect_at_the_next_step_or_at_the_end(usual, steps):
    with pytest.raises(KeyboardInterrupt):
        a_build(Dropped, *steps)


def test_an_interrupt_ends_a_build_at_once(usual):
    with pytest.raises(KeyboardInterrupt):
        a_build(lambda: signal.raise_signal(signal.SIGINT), "a kernel")


def test_a_build_without_interrupt(usual):
    assert a_build(lambda: None, "a kernel", "another") == 2


def test_a_stage_of_unknown_length_has_no_total(usual):
    with BuildProgress() as progress:
        progress.stage("calibration", 0)
        progress.step("samples")
        task = progress.bar.tasks[0]
        assert (task.total, task.completed) == (None, 1)
        progress.stage("int8: timing", 5)
        assert [(t.description, t.total) for t in progress.bar.tasks] == [("int8: timing", 5)]
