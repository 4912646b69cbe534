"""`whet --help` reads the summaries from the sources of the subcommands, without importing them."""

import subprocess
import sys

import click
import pytest

from whet.cli import group, read_summary

LONG = 1000  # characters, so that click shortens nothing


@pytest.mark.parametrize("name", group.list_commands(click.Context(group)))
def test_the_summary_is_the_commands_own(name):
    assert read_summary(name).rstrip(".") == group.get_command(click.Context(group), name).get_short_help_str(LONG).rstrip(".")


def test_help_imports_neither_numpy_nor_a_subcommand():
    names = "('numpy', 'whet.cli.exec')"
    code = f"import sys\nfrom whet.cli import group\ngroup.main(['--help'], standalone_mode=False)\nprint([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
