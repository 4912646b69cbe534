"""What `whet explain` prints: for each layer all that was considered, with times or reasons."""

from __future__ import annotations

from collections.abc import Mapping

from whet.builder.candidates import Option
from whet.builder.search import Search
from whet.engine.plan import Candidate
from whet.network import Network


def candidate_report(search: Search, net: Network, chosen: Mapping[str, Option]) -> dict[str, list[Candidate]]:
    """Per layer of `net` (without its reformats): the chosen candidate first, then by time, then what was not timed, then what was refused."""
    report: dict[str, list[Candidate]] = {}
    for layer in net.layers:
        mine = chosen[layer.name]
        rows = [mine.candidate()]
        others = [o for o in search.kinds[search.kind_of[layer.name]].options if o.ident != mine.ident]
        for o in sorted(others, key=lambda o: (o.ms is None, o.ms or 0.0, o.rank)):
            rows.append(o.candidate(search.why_not(layer, o, net) or o.note or _why_not_chosen(o, mine)))
        apart = search.apart.get(search.kind_of[layer.name])
        if apart is not None:
            rows.append(apart.candidate())
        report[layer.name] = rows + list(search.refused(layer))
    for name, o in chosen.items():
        report.setdefault(name, [o.candidate()])
    return report


def _why_not_chosen(o: Option, mine: Option) -> str:
    if o.ms is None or mine.ms is None:
        return "listed after the chosen one, and nothing was timed"
    if o.ms - mine.ms > max(o.spread_ms, mine.spread_ms):
        return f"{(o.ms / mine.ms - 1) * 100:.0f} % slower"
    if o.signature != mine.signature:
        return "as fast or faster alone, but its formats would cost reformats around it"
    return "not told from the chosen one by time"
