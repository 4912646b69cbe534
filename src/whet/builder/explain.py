"""Records of the candidates of each layer, with times or reasons, for `whet explain`."""

from __future__ import annotations

from collections.abc import Mapping

from whet.builder.select.search import Search
from whet.engine.report import Candidate
from whet.measure.option import Option
from whet.network import Layer, Network


def candidate_report(search: Search, net: Network, chosen: Mapping[str, Option]) -> dict[str, list[Candidate]]:
    """Per layer of `net` (without its reformats): the chosen candidate, then the others by time, untimed candidates and refusals."""
    report: dict[str, list[Candidate]] = {}
    for layer in net.layers:
        mine, *others = _in_order(search, layer, chosen)
        rows = [mine.candidate(), *(o.candidate(search.why_not(layer, o, net) or o.note or _why_not_chosen(o, mine)) for o in others)]
        apart = search.unfused_times.get(search.kind_of[layer.name])
        if apart is not None:
            rows.append(apart.candidate())
        report[layer.name] = rows + list(search.refused(layer))
    for name, o in chosen.items():
        report.setdefault(name, [o.candidate()])
    return report


def cold_report(search: Search, net: Network, chosen: Mapping[str, Option]) -> dict[str, list[float | None]]:
    """Milliseconds with cold weights of a layer's first candidates, in the order of `candidate_report`; layers none of whose were timed so are
    left out, and what follows the last."""
    report = {}
    for layer in net.layers:
        row = [o.cold_ms for o in _in_order(search, layer, chosen)]
        while row and row[-1] is None:
            row.pop()
        if row:
            report[layer.name] = row
    return report


def _in_order(search: Search, layer: Layer, chosen: Mapping[str, Option]) -> list[Option]:
    """The chosen option of a layer, then the others by time, then those without."""
    mine = chosen[layer.name]
    others = [o for o in search.kinds[search.kind_of[layer.name]].options if o.ident != mine.ident]
    return [mine, *sorted(others, key=lambda o: (o.ms is None, o.ms or 0.0, o.rank))]


def _why_not_chosen(o: Option, mine: Option) -> str:
    if o.ms is None or mine.ms is None:
        return "listed after the chosen one, and nothing was timed"
    cold = "" if not o.cold_ms or not mine.cold_ms else f", {(o.cold_ms / mine.cold_ms - 1) * 100:+.0f} % with cold weights"
    if o.ms - mine.ms > max(o.spread_ms, mine.spread_ms):
        return f"{(o.ms / mine.ms - 1) * 100:.0f} % slower{cold}" if mine.ms else f"{(o.ms - mine.ms) * 1e3:.3g} us slower{cold}"
    if o.signature != mine.signature:
        return f"as fast or faster alone{cold}, but its formats would cost reformats around it"
    return f"not told from the chosen one by time{cold}"
