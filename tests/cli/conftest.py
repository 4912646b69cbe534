"""Tests of commands read flags in messages, also where they invoke a command without the group `whet`."""

import pytest

from whet.option_names import flags_are_read


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    with flags_are_read():
        yield
