"""`whet rebuild`: the engine that `whet auto` has deployed, made again from the original model and its data."""

from __future__ import annotations

from pathlib import Path

import click

from whet.cli._console import Bar


@click.command(short_help="Make the engine of a whet auto deploy folder again, from the original model and its data.")
@click.argument("deploy", type=click.Path(file_okay=False))
@click.option("-o", "--out", type=click.Path(file_okay=False), help="New folder for what is made (default: DEPLOY.again beside it).")
@click.option("--project", type=click.Path(file_okay=False), help="Where the folder of the search's recipe lies now, if it was moved.")
def command(deploy: str, out: str | None, project: str | None) -> None:
    """Cut, recover and train the original model as the search did that left DEPLOY, and build it under the folder's lock.

    Nothing is searched or timed. The folder says which channels go and what was trained; weights are computed again from the same data. Where
    they come out bit by bit the same, so does the engine; where they do not (another processor, other libraries), it is said how far they are
    apart, and no engine is made. DEPLOY's own model.onnx builds under the lock too, without data: the README.md there has the command.
    """
    from whet.search import rebuild

    folder = Path(deploy).resolve()
    with Bar("making again") as bar:
        made = rebuild(folder, out or folder.with_name(folder.name + ".again"), project=project, progress=lambda stage: bar.tell(0, 1, stage))
    click.echo(f"{made.folder / 'model.engine'}: the lock's engine, digest {made.digest[:16]}, in {made.seconds:.1f} s")
