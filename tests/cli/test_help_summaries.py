"""`whet --help` reads the summaries from the sources of the subcommands, without importing them."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

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


@pytest.mark.parametrize(("word", "named"), [("build", "whet exec --onnx=MODEL"), ("benchmark", "whet exec --onnx=MODEL"), ("prun", "'prune'")])
def test_a_word_that_is_no_subcommand_names_the_one_meant(word, named):
    done = CliRunner().invoke(group, [word, "--onnx=model.onnx"])
    assert done.exit_code == 2
    assert named in done.output
