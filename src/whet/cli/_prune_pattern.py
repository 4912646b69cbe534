"""`whet prune --pattern`: sparsity patterns in the weights instead of removed channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from whet.cli._console import Bar
from whet.cli._prune_flags import build_config

_USED = {
    "model", "output", "pattern", "ratio", "skip", "data", "preprocess", "samples", "recipe_out", "weights", "no_engines", "as_json",
    "backend", "threads", "shapes", "fp16", "bf16", "int8", "timing_cache", "importance", "labels", "permute",
}  # fmt: skip


_WORDS = {
    "l1": "magnitude",
    "activation": "magnitude and the energy of the inputs",
    "second_order": "the increase of the output error (second order)",
    "taylor1": "the change of the loss (Taylor)",
}


def prune_to_pattern(
    net: Any, text: str, feeds: Any, options: dict[str, Any], say: Callable[[str], None], labels: Any = None
) -> tuple[Any, Any, dict[str, Any]]:
    """The network with the pattern, its recipe (masks, orders of channels), and facts for --json.

    `say` prints the pruned layers, and the measured times for patterns that no kernel exploits.

    Raises UsageError for flags that select channels, and for an invalid pattern; PruneError if it fits no layer.
    """
    from whet.pruning.patterned import apply_pattern, explain_unusable_pattern
    from whet.pruning.recipe import Recipe
    from whet.sparsity.patterns import Blocks, parse_pattern

    pattern = parse_pattern(text, options["ratio"])
    _check_flags(isinstance(pattern, Blocks))
    with Bar("pruning") as bar:
        done = apply_pattern(net, pattern, feeds, importance=options["importance"], labels=labels, permute_seconds=options["permute"],
                             skip=options["skip"], progress=bar.update)  # fmt: skip
    removed = sum(done.removed.values()) / len(done.removed)
    by = _WORDS[options["importance"] if options["importance"] != "auto" else "l1" if feeds is None else "activation"]
    if done.orders:
        say(f"{len(done.orders)} groups of channels were reordered throughout the network, so that more of the scores stay")
    say(f"{pattern.name} by {by} in {len(done.removed)} layers; on average {removed:.0%} of the weights' magnitude was removed")
    if done.refitted:
        say(f"the kept weights of {len(done.refitted)} layers were refitted by least squares, without labels")
    for name, why in done.left.items():
        say(f"left out: {name}: {why}")
    if why := explain_unusable_pattern(pattern, done):
        say(f"{why}{_format_times(net, done.network, options)}. whet prune --latency=0.7x removes whole channels.")
    else:
        say("All these layers are 2:4: `whet sparsity` says which of them run faster, `whet finetune --masks=2:4` restores the accuracy.")
    facts = {"pattern": pattern.name, "removed_magnitude": dict(done.removed), "refitted": list(done.refitted), "left_out": dict(done.left)}
    orders = {name: tuple(map(int, order)) for name, order in done.orders.items()}
    facts["reordered"] = list(orders)
    return done.network, Recipe({}, {"pattern": pattern.name}, masks=done.masks, orders=orders), facts


def _format_times(net: Any, pruned: Any, options: dict[str, Any]) -> str:
    """The measured times of the engine without and with the pattern; "" with --noEngines."""
    if options["no_engines"]:
        return ""
    from whet.pruning.truth import measure_engines

    names = ("backend", "threads", "shapes", "fp16", "bf16", "int8", "timing_cache")
    config = build_config(**{n: options[n] for n in names})
    with Bar("building") as bar:
        before, after = measure_engines([net, pruned], config, progress=bar.update)
    return f": the engine takes {before.ms:.4f} ms before and {after.ms:.4f} ms with the pattern (measured on {options['backend']})"


def _check_flags(uses_ratio: bool) -> None:
    """Raises UsageError for flags that have no effect with --pattern."""
    from whet.errors import UsageError

    now = click.get_current_context()
    used = _USED if uses_ratio else _USED - {"ratio"}
    for p in now.command.params:
        if str(p.name) not in used and now.get_parameter_source(str(p.name)) is not click.core.ParameterSource.DEFAULT:
            why = (
                "the pattern says how many weights stay"
                if p.name == "ratio"
                else "it is for removing channels. Prune channels first, in a run of its own"
            )
            raise UsageError(f"{p.opts[0]} has no effect with --pattern: {why}.")
