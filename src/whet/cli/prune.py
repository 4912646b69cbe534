"""`whet prune`: cut a model down to a share of its channels, or to a latency; recover it without labels, write the smaller model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from whet.cli._console import Bar
from whet.cli._prune_flags import build_config, build_flags, must_have_a_say
from whet.cli._written import must_be_writable

_NEAR = 1.05  # this far beyond the target counts as reached: two timings of one engine differ by as much
_MISSED = "Ask for less, or prune on a quieter machine: what other processes take slows small layers most."
_CHOOSE = {
    "ratio", "latency", "throughput", "flops", "params", "channels", "depth", "importance", "scope", "multiple", "width", "skip", "labels", "retime",
}  # fmt: skip
_TARGETS = ("latency", "throughput", "flops", "params", "channels")


@click.command()
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="ONNX file to write (default: MODEL.pruned.onnx).")
@click.option("--ratio", type=click.FloatRange(0, 1, max_open=True), default=0.4, show_default=True, help="Share of all channels to cut.")
@click.option("--latency", help="Cut until a run takes at most this: 0.5x of what it took, or 3.2ms.")
@click.option("--throughput", help="Cut until at least this many inferences a second: 2x, or a number.")
@click.option("--flops", help="Cut until at most this many FLOPs stay: 0.5x, or a number.")
@click.option("--params", help="Cut until at most this many parameters stay: 0.5x, or a number.")
@click.option("--channels", help="Cut until this share of the channels stays: 0.6x. As --ratio, but chosen as the other targets are.")
@click.option("--depth/--noDepth", "depth", default=True, help="With a target: may residual branches go whole?  [default: depth]")
@click.option("--importance", default="l1", show_default=True,
              help="l1, l2, fpgm, bn_scale, activation, taylor1, taylor2, random, or python:MODULE:FUNCTION.")
@click.option("--scope", type=click.Choice(["global", "group"]), default="global", show_default=True, help="Least important of all, or of each.")
@click.option("--multiple", type=click.IntRange(1), default=8, show_default=True, help="Kept channels of a group are a multiple of this.")
@click.option("--width", multiple=True, metavar="GROUP=N", help="Units that stay of this group, whatever --ratio says (repeatable; --list).")
@click.option("--skip", multiple=True, help="Group, branch or layer that stays whole (repeatable; --list).")
@click.option("--list", "list_only", is_flag=True, help="Name the groups and residual branches that can be cut, and do nothing.")
@click.option("--latencyTable", "table", type=click.Path(dir_okay=False), help="Latency table to use and to extend.")
@click.option("--retime", is_flag=True, help="With --latency: time all layers again, whatever table and timing cache know.")
@click.option("--noEngines", "no_engines", is_flag=True, help="With --latency: trust the table, build no engine to compare.")
@click.option("--calibData", "data", help="Data to recover on, no labels: DIR, FILE.npz, FILE.npy or python:MODULE:FUNCTION.")
@click.option("--calibPreprocess", "preprocess", help="How images become numbers, as for whet exec.")
@click.option("--samples", type=click.IntRange(1), default=256, show_default=True, help="How many samples to recover on.")
@click.option("--labels", type=click.Path(dir_okay=False), help="Classes of those samples (.npy), for Taylor importances.")
@click.option("--recipe", "recipe_out", type=click.Path(dir_okay=False), help="Write what was cut (JSON).")
@click.option("--applyRecipe", "recipe_in", type=click.Path(dir_okay=False), help="Cut what this recipe says, and with --calibData recover it.")
@click.option("--weights", type=click.Path(dir_okay=False), help="Also write the weights as safetensors, by their names in the model.")
@click.option("--insist", is_flag=True, help="Prune although the model is quantized already.")
@build_flags
def command(
    model: str,
    output: str | None,
    data: str | None,
    preprocess: str | None,
    samples: int,
    labels: str | None,
    recipe_out: str | None,
    recipe_in: str | None,
    list_only: bool,
    weights: str | None,
    **options: Any,
) -> None:
    """Cut whole channels, heads and residual branches (coupled through the network), so that every kernel has less to do.

    With --latency or --throughput each layer's time over its widths is measured here, cuts go to the steps in it, and the engine is built
    and timed beside the prediction. Layers that were timed while others used the CPUs are timed again when these rest.
    Without --calibData nothing is recovered: fine-tune the result, or expect to lose much.
    """
    from whet.frontends import network_from_onnx, save_onnx
    from whet.pruning import apply_recipe, count_flops, count_params, load_recipe, prune, recover, save_recipe, save_weights
    from whet.pruning.order import note
    from whet.pruning.recipe import must_have_safetensors
    from whet.search.recipe.data import unlabelled

    net = network_from_onnx(model)
    if list_only:
        click.echo("\n".join(_listed(net)))
        return
    target = output or str(Path(model).with_suffix(".pruned.onnx"))
    must_be_writable(model, recipe_in, data, labels, output=target, recipe=recipe_out, weights=weights, latencyTable=options["table"])
    if weights:
        must_have_safetensors()
    if recipe_in is None:
        must_have_a_say(target=next((t for t in _TARGETS if options[t] is not None), None), data=data, importance=options["importance"])
    config = _config(options)
    feeds = unlabelled(data, net, samples, preprocess) if data else None
    if recipe_in:
        _decided_by_recipe()
        recipe = load_recipe(recipe_in)
        if recipe.masks and recipe_out:
            must_be_writable(model, weights=weights, recipe=str(Path(recipe_out).with_suffix(".safetensors")))
        made = apply_recipe(net, recipe, insist=config.insist, name=Path(recipe_in).name)
        if feeds is not None:
            with Bar("recovering") as bar:
                made = recover(made, net, recipe.kept(), feeds, config.recovery, bar.tell, insist=config.insist)
            note(made, "recover")
        if recipe_out:
            click.echo(f"recipe: {save_recipe(recipe, recipe_out)}")
    else:
        with Bar("pruning") as bar:
            done = prune(net, config, feeds, bar.tell, labels=_labels(labels, data, samples))
        made = done.network
        how = "to the target" if config.target else config.scope
        click.echo(f"cut {done.channels[0] - done.channels[1]} of {done.channels[0]} channels ({done.share:.0%}) by {config.importance}, {how}")
        if done.recipe.removed:
            click.echo(f"removed {len(done.recipe.removed)} residual branches: {', '.join(done.recipe.removed)}")
        for line in done.report.lines():
            click.echo(line)
        if config.target and config.target.ratio and done.report.engine_ms:
            before, after = done.report.engine_ms
            if after > _NEAR * config.target.ratio * before:
                click.echo(f"The target is missed: {after / before:.2f}x of the time where {config.target.ratio:.2f}x was asked for. {_MISSED}")
        if recipe_out:
            click.echo(f"recipe: {save_recipe(done.recipe, recipe_out)}")
        if feeds is not None:
            click.echo(f"recovered without labels on {len(next(iter(feeds.values())))} samples")
        else:
            click.echo("nothing was recovered: give --calibData (no labels needed), or fine-tune")
    save_onnx(made, target)
    if weights:
        click.echo(f"weights: {save_weights(made, weights)}")
    before, after = (count_params(n) for n in (net, made))
    flops = [_flops(count_flops, n) for n in (net, made)]
    click.echo(f"{target}: parameters {before:,} -> {after:,}" + (f", FLOPs {flops[0]:,} -> {flops[1]:,}" if all(flops) else ""))


def _decided_by_recipe() -> None:
    """Refuses flags that choose beside --applyRecipe, which says what is cut. Raises UsageError."""
    from whet.errors import UsageError

    now = click.get_current_context()
    chosen = {p.name: p.opts[0] for p in now.command.params if p.name in _CHOOSE}
    given = [flag for name, flag in chosen.items() if now.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    if given:
        raise UsageError(f"--applyRecipe says what is cut, so {given[0]} has nothing to choose: leave one of them out")


def _listed(net: Any) -> list[str]:
    """Groups and branches in running order, a line each."""
    from whet.pruning import branches, groups

    found, blocks = groups(net), branches(net)
    lines = [f"{len(found)} groups: name, units (channels that each takes), layers that lose some"]
    for g in found:
        each = f" x {g.block}" if g.block > 1 else ""
        lines.append(f"  {g.name}: {g.size}{each}, {len(g.layers)} layers: {', '.join(g.layers[:3])}{', ...' if len(g.layers) > 3 else ''}")
    lines.append(f"{len(blocks)} residual branches that can go whole: name, layers in it")
    lines += [f"  {b.name}: {len(b.layers)} layers, {b.layers[0]} to {b.layers[-1]}" for b in blocks]
    return lines


def _config(o: dict[str, Any]) -> Any:
    """The PruneConfig of the flags. Raises UsageError for two targets."""
    from whet.errors import UsageError
    from whet.pruning import PruneConfig, Target

    given = [(k, o.pop(k)) for k in _TARGETS]
    targets = [Target.parse(k, v) for k, v in given if v is not None]
    if len(targets) > 1:
        raise UsageError(f"one target at a time: --{targets[0].kind} and --{targets[1].kind} are given")
    own = {k: o.pop(k) for k in ("ratio", "depth", "importance", "scope", "multiple", "table", "retime", "insist")}
    skip, engines, widths = o.pop("skip"), not o.pop("no_engines"), _widths(o.pop("width"))
    return PruneConfig(**own, skip=skip, widths=widths, engines=engines, target=targets[0] if targets else None, build=build_config(**o))


def _widths(given: tuple[str, ...]) -> dict[str, int]:
    """Units by group, of GROUP=N. Raises UsageError."""
    from whet.errors import UsageError

    found = {}
    for word in given:
        name, equals, number = word.rpartition("=")
        if not equals or not name or not number.isdecimal():
            raise UsageError(f"--width={word}: write GROUP=N, the units that stay, as --width=layer1.0.conv1.weight=48")
        found[name] = int(number)
    return found


def _flops(count: Any, net: Any) -> int:
    """FLOPs with every symbol 1; 0 where a symbol stands where that makes no sense."""
    from whet.errors import WhetError

    try:
        return int(count(net))
    except WhetError:
        return 0


def _labels(path: str | None, data: str | None, samples: int) -> Any:
    """The classes, in a .npy file, of the samples that `unlabelled` takes. Raises UsageError for a file that cannot be read."""
    if path is None:
        return None
    from zipfile import BadZipFile

    import numpy as np

    from whet.errors import UsageError
    from whet.search.recipe.data import in_order
    from whet.search.recipe.image_data import spread

    try:
        found = np.load(path, allow_pickle=False).reshape(-1)
        return found[:samples] if data is None or in_order(data) else np.array(spread(list(found), samples))
    except OSError as e:
        raise UsageError(f"--labels={path}: {e.strerror or e}. Give a .npy file of whole numbers, one a sample.") from e
    except (ValueError, EOFError, AttributeError, BadZipFile) as e:  # its text would tell people to load it unsafely
        raise UsageError(f"--labels={path} is no .npy file of numbers. Give one of whole numbers, one a sample.") from e
