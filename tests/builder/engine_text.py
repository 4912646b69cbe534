"""The text form of an engine plan in golden files: the selected kernel of each layer, and the memory plan."""

from __future__ import annotations

from whet.engine import EnginePlan


def engine_text(plan: EnginePlan) -> str:
    """One line per layer (tactic, config, formats, in place), then arenas; no digests, so that diffs are readable."""
    out = [f"backend {plan.backend}, {plan.threads} thread(s), choice {plan.report.choice.method}"]
    for layer in plan.network.layers:
        c = plan.choices[layer.name]
        config = ",".join(f"{k}={v}" for k, v in c.config)
        ins = ", ".join("-" if o is None else f"%{t.name} {o[1]}:{o[0]}" for t, o in zip(layer.inputs, c.inputs, strict=True) if t is not None)
        outs = ", ".join(f"%{t.name} {o[1]}:{o[0]}" for t, o in zip(layer.outputs, c.outputs, strict=True))
        inplace = "".join(f" in place {i}->{o}" for i, o in c.inplace)
        out.append(f"{c.tactic}({config}) {layer.op} {layer.name}\n    ({ins}) -> {outs}{inplace}")
    for k, a in enumerate(plan.arenas):
        out.append(f"arena {k}: {a.total} bytes, scratch {a.scratch_bytes} at {a.scratch_offset}")
        out += [f"    {a.offsets[n]:>9} {a.sizes[n]:>9} %{n}" for n in sorted(a.offsets, key=lambda n: (a.offsets[n], n))]
    return "\n".join(out) + "\n"
