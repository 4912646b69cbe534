"""The command line: `whet <subcommand>`. Every module of this package is a subcommand."""

from __future__ import annotations

import builtins
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from whet.cli._failures import describe_failure
from whet.cli._other_tools import SUBCOMMANDS, refuse_options_of_exec
from whet.cli._termination import Termination
from whet.errors import WhetError
from whet.option_names import keep_flags
from whet.progress_lines import ProgressLines
from whet.registry import suggest_name


class Subcommands(click.Group):
    """Subcommands are the modules of this package; each is imported only when it is called or listed."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with keep_flags():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        if sys.stderr.isatty():
            return super().invoke(ctx)
        with ProgressLines(lambda: f"whet {ctx.invoked_subcommand or 'starts'}"):
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        refuse_options_of_exec(ctx, args)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        from pkgutil import iter_modules

        return sorted(m.name.replace("_", "-") for m in iter_modules(__path__) if not m.name.startswith("_") and m.name != "__main__")

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        from importlib import import_module

        if name not in self.list_commands(ctx):
            return None
        return import_module(f"{__name__}.{name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, read_summary(name)) for name in self.list_commands(ctx)])

    def resolve_command(self, ctx: click.Context, args: list[str]):
        name = args[0] if args else ""
        if name in SUBCOMMANDS:
            raise click.UsageError(f"there is no subcommand {name!r}: {SUBCOMMANDS[name]}", ctx)
        if self.get_command(ctx, name) is None:
            raise click.UsageError(f"there is no subcommand {name!r}.{suggest_name(name, self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)


def read_summary(name: str) -> str:
    """The summary of a subcommand, read from its source: importing all subcommands takes longer than the rest of `whet --help`."""
    import ast
    import re
    from pathlib import Path

    source = (Path(__file__).parent / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "command")
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            if keyword.arg == "short_help" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
    return re.sub(r"\s+", " ", (ast.get_docstring(function) or "").partition("\n\n")[0])


def _print_version(context: click.Context, option: click.Parameter, requested: bool) -> None:
    """Imports the version's facts only for --version."""
    if requested:
        from whet.cli._version import print_version

        print_version(context, option, requested)


@click.command(cls=Subcommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show versions and the machine.")
def group() -> None:
    """Build the fastest correct inference engine from a trained network, and explain every decision.

    \b
    Start here:
      whet zoo resnet18 -o resnet18.onnx            write a standard network with random weights
      whet check resnet18.onnx                      check that every node is supported
      whet exec --onnx=resnet18.onnx --saveEngine=r.engine
                                                    build, time and summarize (trtexec's flags)
      whet explain r.engine                         explain the choice of every layer's tactic
    """


def main(argv: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 success, 1 an error with a printed message (WhetError, OSError, MemoryError), 2 wrong usage,
    130 interrupted (SIGINT), 143 terminated (SIGTERM, which ends a command in the same way)."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):  # characters outside the terminal's encoding are written as \\u....
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without Python's file and line
    termination = Termination()
    try:
        with termination:
            code = group.main(args=argv, prog_name="whet", standalone_mode=False)
        if isinstance(code, int) and code:
            sys.exit(code)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        _exit_interrupted(termination, argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (WhetError, OSError, MemoryError) as e:
        text, code = describe_failure(e)
        click.echo(text, err=True)
        sys.exit(code)
    except RuntimeError as e:
        if isinstance(e.__cause__, KeyboardInterrupt):  # Python 3.11 wraps exceptions in __set_name__, while a module with dataclasses is imported
            _exit_interrupted(termination, argv)
        raise


def _open_missing_streams() -> None:
    """Opens the standard streams that the caller closed (`2>&-`, some daemons) as /dev/null: a file opened later would get descriptor 1 or 2,
    into which libraries and child processes write."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


#: what an interrupted command leaves for the next run; commands that time layers keep the times
_TIMINGS_KEPT = "Finished timings are kept in the timing cache; the next run continues from there."
_KEPT = {
    **dict.fromkeys(("exec", "retune", "rebuild", "compare", "sparsity", "latency-table"), _TIMINGS_KEPT),
    "auto": "The same command continues the search.",
    "finetune": "A training with --checkpoint continues from its last checkpoint.",
}


def _describe_kept(arguments: Sequence[str]) -> str:
    """The sentence about what an interrupted command has kept, "" if nothing."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    timed = command == "prune" and any(word.startswith(("--latency", "--throughput")) for word in arguments)
    return _TIMINGS_KEPT if timed else _KEPT.get(command, "")


def _exit_interrupted(termination: Termination, argv: Sequence[str] | None) -> NoReturn:
    """Ends the process with the message and exit code of an interruption."""
    event, status = ("Terminated", 143) if termination.received else ("Interrupted", 130)
    click.echo(f"\n{event}. {_describe_kept(sys.argv[1:] if argv is None else argv)}".rstrip(), err=True)
    builtins.exec("")  # clears Python's flag of a KeyboardInterrupt that left an earlier exec(): it would end the process by SIGINT
    sys.exit(status)
