"""`whet rebuild`: rebuilds an engine deployed by `whet auto` from the original model and its data."""

from __future__ import annotations

import click

from whet.cli._console import Bar, print_json
from whet.files import resolve_path


@click.command(short_help="Rebuild the engine of a whet auto deploy folder from the original model and its data.")
@click.argument("deploy", type=click.Path(file_okay=False))
@click.option("-o", "--out", type=click.Path(file_okay=False), help="New output folder (default: DEPLOY.again next to it).")
@click.option("--project", type=click.Path(file_okay=False), help="Folder of the search's recipe, if it was moved.")
@click.option("--json", "as_json", is_flag=True, help="JSON output; messages go to standard error.")
def command(deploy: str, out: str | None, project: str | None, as_json: bool) -> None:
    """Prune, recover and train the original model exactly as the search that wrote DEPLOY, and build it under the folder's lock.

    Nothing is searched or timed. The folder records the removed channels and the training; weights are recomputed from the same data. If they
    are bit-identical, so is the engine. Otherwise (another processor, other libraries) the differences are reported and no engine is
    written. DEPLOY's model.onnx builds under the lock without data: its README.md has the command.
    """
    from whet.search import rebuild

    folder = resolve_path(deploy)
    with Bar("rebuilding") as bar:
        rebuilt = rebuild(folder, out or folder.with_name(folder.name + ".again"), project=project, progress=lambda stage: bar.update(0, 1, stage))
    if as_json:
        print_json({"engine": rebuilt.folder / "model.engine", "digest": rebuilt.digest, "seconds": rebuilt.seconds})
        return
    click.echo(f"{rebuilt.folder / 'model.engine'}: the lock's engine, digest {rebuilt.digest[:16]}, in {rebuilt.seconds:.1f} s")
