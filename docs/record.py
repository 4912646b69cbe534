"""Makes docs/terminal.svg: real commands, their real output, as a terminal shows it. Usage: python docs/record.py"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = [
    "whet zoo resnet18 -o resnet18.onnx",
    "whet check resnet18.onnx",
    "whet exec --onnx=resnet18.onnx --fp16 --int8 --saveEngine=r.engine --duration=1",
    "whet explain r.engine --top=6",
]
LINES = 34  # of each command's output; the middle of longer output is left out, and said so


def main() -> None:
    console = Console(record=True, width=150, force_terminal=True, file=open("/dev/null", "w"))
    whet = Path(sys.executable).parent / "whet"
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            argv = shlex.split(command)
            wide = {**os.environ, "COLUMNS": "148"}
            done = subprocess.run([str(whet), *argv[1:]], cwd=folder, env=wide, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            console.print(Text(f"$ {command}", style="bold green"))
            lines = done.stdout.splitlines()
            if len(lines) > LINES:
                cut = len(lines) - LINES
                lines = [*lines[: LINES // 3], f"  ... {cut} lines left out ...", *lines[-(LINES - LINES // 3) :]]
            console.print(Text("\n".join(lines)))
            console.print()
    console.save_svg(str(Path(__file__).parent / "terminal.svg"), title="whet")


if __name__ == "__main__":
    main()
