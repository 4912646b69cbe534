"""The page of a search: the verdict, the Pareto plot, compared engines with p99, a waterfall of the steps, layers before and after, all trials.

It is rendered from the plain data in report.json (written by search/outcome/summary.py) and can be regenerated from that file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from whet.inspector.summary import shorten, shorten_name
from whet.report._figures import Figure, format_hover, plot_bars, plot_waterfall
from whet.report._html import Html, format_digits, h, render_bar, render_table, tag
from whet.report._page import make_page, render_chart
from whet.report._pareto import plot_pareto

Data = Mapping[str, Any]
_MIB = 2.0**20


def render_search_page(data: Data) -> str:
    """The page as self-contained HTML without external requests, enforced by its content security policy."""
    parts = [
        _render_head(data),
        _render_plots(data),
        _render_comparison(data),
        _render_steps(data),
        _render_layers(data),
        _render_trials(data),
        _render_about(data),
    ]
    figures: dict[str, Figure] = {"latency": _plot_latency(data)}
    for name, axis in _list_plots(data).items():
        if points := _list_points(data, axis):
            figures[name] = plot_pareto(
                points, x_name=f"{axis['name']}, relative to the FP32 original", y_name=data["metric"], limit_x=axis["limit"],
                limit_y=data["limits"]["metric"], higher=data["higher_is_better"],
            )  # fmt: skip
    if len(data["steps"]) > 1:
        figures |= {name: _plot_steps(data, name, title) for name, title in _list_waterfalls(data).items()}
    return make_page(f"whet auto: {data['model']}", Html("\n".join(parts)), figures)


def _render_head(d: Data) -> Html:
    rows = d["rows"]
    chosen, original = rows[d["chosen"]], rows[0]
    verdict = "The target is met." if d["met"] else "The target is not met; this is the nearest that was found."
    seen = "on data that the search has not seen" if d["scored_on"] == "judge" else "on the data that the trials were scored on"
    checks: list[Any] = []
    for c in chosen["checks"]:
        checks += ["; "] if checks else []
        checks.append(tag("span", c["text"], class_=None if c["met"] else "miss"))
    return Html("".join([
        tag("h1", d["model"]),
        tag("p", d["device"], " · ", _format_date(d["date"]), " · ", f"{len(d['trials'])} trials · {_format_duration(d['seconds'])}", class_="dim"),
        tag("p", verdict, class_="verdict" if d["met"] else "verdict no"),
        tag("p", tag("b", chosen["name"]), ": ", _join_lines(chosen["what"])),
        tag("p", *checks),
        tag("div",
            _render_tile(f"{format_digits(1 / chosen['latency']['ratio'])}x", "the original's speed, timed interleaved with it"),
            _render_tile(f"{format_digits(original['latency']['median_ms'])} → {format_digits(chosen['latency']['median_ms'])} ms", "a run, median"),
            _render_tile(" → ".join(format_digits(x["metric"]["value"], 4) for x in (original, chosen)), f"{d['metric']}, {seen}"),
            _render_tile(f"{format_digits(original['memory_bytes'] / _MIB)} → {format_digits(chosen['memory_bytes'] / _MIB)} MiB", "peak memory"),
            _render_tile(f"{format_digits(original['engine_bytes'] / _MIB)} → {format_digits(chosen['engine_bytes'] / _MIB)} MiB", "engine file"),
            *_render_energy_tile(original["energy"], chosen["energy"]),
            class_="tiles"),
        *(tag("p", n, class_="dim") for n in d["warnings"]),
    ]))  # fmt: skip


def _render_energy_tile(before: Data, after: Data) -> list[Html]:
    """Energy per sample, net of idle power if known."""
    for kind, what in (("net_mj", "energy a sample, without power at rest"), ("mj", "energy a sample")):
        if before.get(kind) is not None and after.get(kind) is not None:
            return [_render_tile(f"{format_digits(before[kind])} → {format_digits(after[kind])} mJ", what)]
    return []


def _render_tile(value: str, title: str) -> Html:
    return tag("div", tag("b", value), tag("span", title), class_="tile")


def _list_plots(d: Data) -> dict[str, Data]:
    """The axis of each Pareto plot by the name of its figure: one for each quantity with a target. Results of earlier versions have only time."""
    time = d["cost_name"].partition(",")[0]
    axes = d.get("axes") or [{"name": time, "key": None, "limit": d["limits"]["cost"]}]
    return {f"pareto-{axis['key'] or 'time'}" if k else "pareto": axis for k, axis in enumerate(axes)}


def _compute_position(row: Data, d: Data, axis: Data) -> float | None:
    """A row's value on an axis, relative to the original's; None if it was not measured."""
    if axis["key"] is None:
        return row["cost"]
    value, original = ((r["energy"] if axis["key"] in r["energy"] else r).get(axis["key"]) for r in (row, d["rows"][0]))
    return value / original if value is not None and original else None


def _list_points(d: Data, axis: Data) -> list[dict[str, Any]]:
    """The points of a Pareto plot: trials, then the compared engines. The Pareto set is that of time, so other plots do not draw it."""
    points = []
    for t in d["trials"]:
        if t["state"] == "done" and t["same_as"] is None and (x := _compute_position(t, d, axis)) is not None:
            points.append({"x": x, "y": t["metric"]["value"], "kind": "scout", "front": t["front"] and axis["key"] is None,
                           "name": f"trial {t['number']}", "lines": [t["what"], *_list_result_lines(t, d), t["verdict"]]})  # fmt: skip
    for i, r in enumerate(d["rows"]):
        chosen = i == d["chosen"]
        if (x := _compute_position(r, d, axis)) is None:
            continue
        points.append({"x": x, "y": r["metric"]["value"], "kind": r["kind"], "chosen": chosen, "name": r["name"],
                       "lines": [x for x in (r["what"], *_list_result_lines(r, d), "chosen" if chosen else "") if x]})  # fmt: skip
    return points


def _render_plots(d: Data) -> Html:
    if not any(t["state"] == "done" for t in d["trials"]) and not d["rows"]:
        return tag("p", "No trial finished.")
    note = "Ring: chosen. Line: Pareto set of the trials in time. Triangle: below the plot."
    if d["scored_on"] == "judge":
        note += " Trials are scored on other data than originals and survivors, which were judged last: their heights differ by chance too."
    plots = "".join(
        render_chart(name, f"{d['metric']} against {axis['name']}", 440) for name, axis in _list_plots(d).items() if _list_points(d, axis)
    )
    first = next(iter(_list_plots(d).values()))["name"]
    title = "Time" if first.startswith("time") else first.capitalize()
    return Html(tag("h2", f"{title} against {d['metric']}") + plots + tag("p", note, class_="dim"))


def _plot_latency(d: Data) -> Figure:
    """Medians of the compared engines; the whiskers end at p99."""
    rows = d["rows"]
    ms = [r["latency"] for r in rows]
    hover = [
        format_hover(r["name"], r["what"], f"median {format_digits(m['median_ms'])} ms, p99 {format_digits(m['p99_ms'])} ms")
        for r, m in zip(rows, ms, strict=True)
    ]
    return plot_bars(
        [shorten(r["name"], 24) for r in rows], [m["median_ms"] for m in ms], hover, title="ms",
        shown=[f"{format_digits(m['median_ms'])} ms" for m in ms], error=[max(m["p99_ms"] - m["median_ms"], 0.0) for m in ms],
        colors=["--accent" if i == d["chosen"] else "--grey" for i in range(len(rows))],
    )  # fmt: skip


def _list_waterfalls(d: Data) -> dict[str, str]:
    """The figures of what each step brought, with the titles of their axes; only quantities that every shown step has."""
    wanted = {"step-ms": "median ms of a run", "step-params": "million parameters", "step-flops": "MFLOPs", "step-metric": d["metric"]}
    return {name: title for name, title in wanted.items() if len(_list_step_totals(d, name)[1]) > 1}


def _plot_steps(d: Data, name: str, title: str) -> Figure:
    """The change of one quantity by each step."""
    steps, values = _list_step_totals(d, name)
    changes = ["", *(f" ({b - a:+.3g})" if b != a else " (=)" for a, b in itertools.pairwise(values))]
    shown = [format_digits(v, 4) + change for v, change in zip(values, changes, strict=True)]
    hover = [format_hover(s, text) for s, text in zip(steps, shown, strict=True)]
    better = name == "step-metric" and d["higher_is_better"]
    return plot_waterfall(
        [shorten(s, 24) for s in steps], values, hover, title=title, shown=[*shown, format_digits(values[-1], 4)], more_is_better=better
    )


def _list_step_totals(d: Data, name: str) -> tuple[list[str], list[float]]:
    """(names, values) of the steps with a known quantity. An original without its own time takes that of the compared engines."""

    def get_step_value(s: Data) -> float | None:
        if name == "step-ms":
            return s.get("ms", d["rows"][0]["latency"]["median_ms"] if s is d["steps"][0] and d["rows"] else None)
        if name == "step-metric":
            return s["metric"]["value"] if s.get("metric") else None
        return s["params"] / 1e6 if name == "step-params" else s["flops"] / 1e6 if s["flops"] else None

    kept = [(s["step"], v) for s in d["steps"] if (v := get_step_value(s)) is not None]
    return [step for step, _ in kept], [v for _, v in kept]


def _list_result_lines(r: Data, d: Data) -> list[str]:
    m = r["metric"]
    sure = f" (95 %: {format_digits(m['low'], 4)} to {format_digits(m['high'], 4)}, {m['samples']} samples)" if m["low"] is not None else ""
    ms, mj = r["latency"], r["energy"]
    spent = [f"{format_digits(mj['mj'])} mJ a sample, net {format_digits(mj.get('net_mj'))}"] if mj["mj"] is not None else []
    return [f"{format_ratio(ms)} of the original's time, {format_digits(ms['median_ms'])} ms, p99 {format_digits(ms['p99_ms'])} ms",
            f"{d['metric']} {format_digits(m['value'], 4)}{sure}", *spent]  # fmt: skip


def format_ratio(ms: Data) -> str:
    """The time relative to the original's with its 95 % interval: 0.450x (0.441 to 0.459)."""
    low, high = ms.get("ratio_interval", (None, None))
    return f"{format_digits(ms['ratio'])}x" + (f" ({format_digits(low, 3)} to {format_digits(high, 3)})" if low is not None else "")


def render_ratio(ms: Data) -> Html:
    """The time relative to the original's with its 95 % interval; what contradicts it, if something does."""
    if "contradiction" in ms:
        return Html(h(format_digits(ms["ratio"])) + tag("small", "uncertain: " + " or ".join(format_digits(v) for v in ms["contradiction"])))
    low, high = ms.get("ratio_interval", (None, None))
    return Html(_render_interval(format_digits(ms["ratio"]), {"low": low, "high": high}, 3))


def _render_comparison(d: Data) -> Html:
    metered = any(r["energy"]["mj"] is not None for r in d["rows"])
    head = ("engine", "target", "what", d["metric"], "lost", "median ms", "p99 ms", "x original", "samples/s", "memory MiB", "engine MiB",
            *(["mJ a sample", "net mJ"] if metered else []), "build s", "parameters", "MFLOPs")  # fmt: skip
    rows, classes = [], []
    for i, r in enumerate(d["rows"]):
        m, ms = r["metric"], r["latency"]
        drop = r["drop"]
        front = tag("small", "Pareto set") if r.get("front") else ""
        rows.append((
            Html(h(r["name"]) + front), "met" if r["met"] else tag("span", "; ".join(c["text"] for c in r["checks"] if not c["met"]), class_="miss"),
            _join_lines(r["what"]), _render_interval(format_digits(m["value"], 4), m, 4), _render_interval(format_digits(drop["value"]), drop, 3),
            format_digits(ms["median_ms"]), format_digits(ms["p99_ms"]), render_ratio(ms), format_digits(r["throughput"]),
            format_digits(r["memory_bytes"] / _MIB), format_digits(r["engine_bytes"] / _MIB),
            *([format_digits(r["energy"]["mj"]), format_digits(r["energy"].get("net_mj"))] if metered else []),
            format_digits(r["build_seconds"]), format_digits(r["params"]),
            format_digits(r["flops"] / 1e6) if r["flops"] else "-",
        ))  # fmt: skip
        classes.append("chosen" if i == d["chosen"] else None)
    about = "All timed interleaved in one process; none here is both faster and better than one of the Pareto set, "
    about += "with times or metrics whose intervals do not overlap. "
    about += "Intervals are 95 %; what was lost is compared sample by sample. "
    about += f"Energy{' of the original' if metered else ''}: {d['rows'][0]['energy']['about']}."
    load = d["load"]
    if load.get("other_cpus") is not None:
        care = ", so times are to be read with care" if load["disturbed"] else ""
        about += f" Others (processes, or guests of the same host) took {load['other_cpus']:.2f} CPUs meanwhile{care}."
    shown = tag("div", render_table(head, rows, right=range(3, len(head)), classes=classes), id="compared")
    bars = render_chart("latency", "Median time of each engine, with p99", 90 + 34 * len(rows)) + tag(
        "p", "Medians; the whiskers end at p99.", class_="dim"
    )
    return Html(tag("h2", "The engines compared") + bars + shown + tag("p", about, class_="dim"))


def _join_lines(text: str) -> Html:
    """Text in which no line begins with a percent sign."""
    return Html(h(text).replace(" %", "&nbsp;%"))


def _render_interval(value: str, interval: Data, digits: int) -> Html:
    """A value, its interval in small print below it."""
    if interval["low"] is None:
        return h(value)
    return Html(h(value) + tag("small", f"{format_digits(interval['low'], digits)} to {format_digits(interval['high'], digits)}"))


def _render_steps(d: Data) -> Html:
    """The result of each step towards the chosen engine."""
    steps = d["steps"]
    if not steps:
        return Html("")
    most = max((s["params"] for s in steps), default=1) or 1
    rows = []
    for s in steps:
        m = s.get("metric")
        rows.append((s["step"], render_bar(s["params"] / most), format_digits(s["params"]), format_digits(s["flops"] / 1e6) if s["flops"] else "-",
                     format_digits(m["value"], 4) if m else "-", format_digits(s.get("ms")), _format_seconds(s["seconds"])))  # fmt: skip
    head = ("step", "", "parameters", "MFLOPs", d["metric"], "ms", "took s")
    note = "Scored on the trials' data. Times up to the engine are those of FP32 engines, timed interleaved with it. "
    note += "Steps that change weights alone keep the time of the step before."
    falls = Html("")
    if len(steps) > 1:
        charts = [
            render_chart(name, f"{title} after each step", 110 + 38 * len(_list_step_totals(d, name)[1]))
            for name, title in _list_waterfalls(d).items()
        ]
        falls = tag("div", *charts, class_="pairs")
    return Html(tag("h2", "What each step gave") + falls + render_table(head, rows, right=range(2, 7)) + tag("p", note, class_="dim"))


def _render_layers(d: Data) -> Html:
    rows = d["layers"]
    if not rows:
        return Html("")
    most = max([r["before_ms"] or 0.0 for r in rows] + [r["after_ms"] or 0.0 for r in rows]) or 1.0
    cells = [
        (shorten_name(r["name"]), render_bar((r["before_ms"] or 0) / most, "before"), format_digits(r["before_ms"]),
         render_bar((r["after_ms"] or 0) / most),
         format_digits(r["after_ms"]), r["before"] or "-", r["after"] or "-")
        for r in rows
    ]  # fmt: skip
    head = ("nodes of the model", "", "before ms", "", "after ms", "kernel before", "kernel after")
    note = "Times of single layers as their builds measured them (reformats between layers apart): their sum is not the engine's time."
    return Html(tag("h2", "Layer by layer") + render_table(head, cells, right=(2, 4)) + tag("p", note, class_="dim"))


def _render_trials(d: Data) -> Html:
    rows, classes = [], []
    for t in d["trials"]:
        ok = t["state"] == "done"
        busy = tag("small", "busy machine") if ok and t["load"]["disturbed"] else Html("")
        figures: list[Any] = ["-"] * 4
        if ok:
            ms = t["latency"]
            figures = [
                Html(render_ratio(ms) + busy),
                format_digits(ms["median_ms"]),
                format_digits(t["metric"]["value"], 4),
                format_digits(t["seconds"]),
            ]
        rows.append((t["number"], _join_lines(t["what"]), *figures, t["verdict"]))
        classes.append("failed" if not ok else "chosen" if t["kept"] else "rejected" if t["same_as"] is not None or not t["met"] else None)
    cuts = [tag("li", tag("b", name), ": ", what) for name, what in d.get("classes", {}).items()]
    explained = tag("p", "What the cuts are:") + tag("ul", *cuts) if cuts else ""
    left = [tag("li", tag("b", what), ": ", _mark_code(why)) for what, why in d["left_out"]]
    more = tag("p", "Not searched over:") + tag("ul", *left) if left else ""
    field = tag("input", id="filter", data_table="trials", placeholder="show only trials with…", aria_label="filter the trials")
    return tag("section", tag("h2", "Tried, kept and rejected"), tag("p", field),
               tag("div", render_table(("trial", "what", "x original", "median ms", d["metric"], "took s", "what became of it"), rows,
                                       right=(0, 2, 3, 4, 5),
                                classes=classes), class_="limited"), Html(explained), Html(more), id="trials")  # fmt: skip


def _mark_code(text: str) -> Html:
    """Text with its `backquoted` parts as code."""
    return Html("".join(tag("code", part) if k % 2 else h(part) for k, part in enumerate(text.split("`"))))


def _render_about(d: Data) -> Html:
    def block(name: str, text: str) -> Html:
        return tag("details", tag("summary", name), tag("pre", text))

    blocks = [block("recipe", d["recipe_text"]), block("machine and versions", d["machine_text"])]
    if d["notes"]:
        blocks.append(block(f"notes ({len(d['notes'])})", "\n".join(d["notes"])))
    return Html(tag("h2", "Run it") + tag("pre", "\n".join(d["commands"])) + Html("\n".join(blocks)))


def _format_date(date: str) -> str:
    """An ISO date as people write it."""
    return date[:16].replace("T", " ") + " UTC" if date.endswith("+00:00") else date


def _format_seconds(seconds: float) -> str:
    return format_digits(seconds) if seconds >= 0.1 else "< 0.1"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"

