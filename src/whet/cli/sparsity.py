"""`whet sparsity`: times dense against 2:4 sparse tactics of each layer, before anyone fine-tunes."""

from __future__ import annotations

import json
from typing import Any

import click

from whet.cli._console import Bar, console, print_table
from whet.cli._prune_flags import build_config, build_flags


@click.command()
@click.argument("model", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="JSON output, times in milliseconds.")
@click.option("--batch", type=click.IntRange(1), help="Set the first axis of every input to this; instead of --shapes.")
@build_flags
def command(model: str, as_json: bool, batch: int | None, **build: Any) -> None:
    """Say which layers of MODEL would be faster with 2:4 sparse weights, before any fine-tuning.

    2:4 means that two of every four weights along the input channels are zero. Each layer is timed on this machine with its dense and its
    sparse tactics, as if its weights were pruned. `removed` is the share of the weights' magnitude that pruning would take: the larger it
    is, the more fine-tuning has to repair (normally distributed weights: 26 %). The gain depends on the batch: try --batch=1 and --batch=128.
    Then `whet exec --sparsity=force` times the whole engine, and `whet finetune` trains 2:4 weights.
    """
    from whet.cli._model import network_for
    from whet.errors import UsageError
    from whet.network import evaluate
    from whet.pruning.sparsity_advice import advise_sparsity

    if batch is not None:
        if build["shapes"]:
            raise UsageError("--batch and --shapes both give the shapes. Leave one of them out.")
        free = [t for t in network_for(model, None)[0].inputs if not t.type.static]
        sizes = {t.name: (batch, *(d if isinstance(d, int) else evaluate(d, dict.fromkeys(d.names, 1)) for d in t.shape[1:])) for t in free}
        if not free:
            raise UsageError(f"--batch={batch}: the inputs of {model} have fixed shapes. Export it with a dynamic batch, or leave out --batch.")
        build["shapes"] = ",".join(f"{n}:{'x'.join(map(str, s))}" for n, s in sizes.items())
    net, _ = network_for(model, build["shapes"])
    with Bar("timing") as bar:
        advice = advise_sparsity(net, build_config(**build), bar.update)
    if as_json:
        click.echo(json.dumps(advice.to_json(), indent=1))
        return
    out = console()
    out.width = min(out.width, 100)
    rows = [[_ms(x.dense_ms), _ms(x.sparse_ms), _ms(x.saved_ms), "-" if x.removed_magnitude is None else f"{x.removed_magnitude:.0%}",
             x.layer, x.reason or x.sparse_tactic] for x in advice.layers]  # fmt: skip
    print_table(out, [">dense ms", ">sparse ms", ">saved", ">removed", "layer", "result"], rows, below=("layer", "result"))
    out.print(advice.verdict)


def _ms(v: float | None) -> str:
    return "-" if v is None else f"{v:.4f}"
