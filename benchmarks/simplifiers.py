"""Nodes that onnxsim and onnxslim still remove after whet's import passes: counts of models before and after each.

    python benchmarks/simplifiers.py [--models name,file.onnx,...] [--data FOLDER]

Needs pip install onnxsim onnxslim.

The models are those of _simplifier_models.py and, where --data or WHET_DATA names the folder of real networks, those in it. A row counts the nodes of
a model, of what onnxsim and onnxslim make of it, of whet's network written back to ONNX, and of what the tools make of that. `left` is True if a tool
removes nodes of whet's. Constants do not count, nodes of subgraphs do. whet's passes are those of the phases CLEAN, RECOGNIZE and FOLD; fused layers
are not written. Writes results/cpu/simplifiers.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
from _record import alone, provenance
from _simplifier_models import MODELS, model_of

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
RESULT = Path(__file__).parent / "results" / "cpu" / "simplifiers.json"
LARGEST = 60e6  # bytes of a model: the tools fold constants with ONNX Runtime, which takes minutes for more
PACKAGES = ("whet", "onnx", "onnxsim", "onnxslim", "onnxruntime")


def simplify(source: Any) -> onnx.ModelProto:
    """The model after whet's passes that keep to ONNX's ops."""
    from whet.frontends import network_from_onnx, onnx_from_network
    from whet.passes import PASSES, Phase, lower

    others = ("conv_1d_to_2d", "gemm_to_canonical")  # forms for kernels
    switches = [f"-{p.name}" for p in PASSES.values() if p.phase > Phase.FOLD or p.name in others]
    return onnx_from_network(lower(network_from_onnx(source), switches=switches)[0])


def count(graph: onnx.GraphProto) -> Counter[str]:
    """Nodes by op, those of subgraphs included."""
    found: Counter[str] = Counter()
    for node in graph.node:
        if node.op_type != "Constant":
            found[node.op_type] += 1
        for a in node.attribute:
            found += count(a.g)
    return found


def by_onnxsim(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxsim's result."""
    import onnxsim

    return onnxsim.simplify(model)[0]


def by_onnxslim(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnxslim's result."""
    import onnxslim

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return onnxslim.slim(copy)


def row_of(name: str, model: onnx.ModelProto, source: Any) -> dict[str, Any]:
    """The row of a model."""
    whet = simplify(source)
    row: dict[str, Any] = {"model": name, "nodes": count(model.graph).total(), "whet": count(whet.graph).total()}
    for tool, run in (("onnxsim", by_onnxsim), ("onnxslim", by_onnxslim)):
        for key, given in ((tool, model), (f"{tool}_after_whet", whet)):
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    made = count(run(given).graph)
                row[key] = made.total()
                if given is whet and made.total() < row["whet"]:
                    row[f"{tool}_removed"] = dict(count(whet.graph) - made)
            except Exception as e:  # noqa: BLE001 - a tool's failure is part of the row
                row[key] = f"{type(e).__name__}: {e}"[:200]
    row["left"] = any(isinstance(row[k], int) and row[k] < row["whet"] for k in ("onnxsim_after_whet", "onnxslim_after_whet"))
    best = [row[k] for k in ("onnxsim", "onnxslim") if isinstance(row[k], int)]
    row["fewest"] = row["whet"] <= min(best) if best else True
    return row


def main() -> None:
    """Measures the models one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="")
    parser.add_argument("--data", default=os.environ.get("WHET_DATA", ""))
    o = parser.parse_args()
    files = sorted(p for p in Path(o.data).rglob("*.onnx") if p.stat().st_size < LARGEST) if o.data else []
    chosen = o.models.split(",") if o.models else [*MODELS, *map(str, files)]
    for name in chosen:
        source = Path(name) if name.endswith(".onnx") else None
        model = model_of(name) if source is None else onnx.load(source)
        try:
            row = row_of(name if source is None else source.stem, model, source or model.SerializeToString())
        except Exception as e:  # noqa: BLE001 - one row says what failed, the others follow
            row = {"model": Path(name).stem, "failed": f"{type(e).__name__}: {e}"[:300]}
        print(json.dumps(row), flush=True)
        with alone(RESULT):
            old = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
            rows = [r for r in old if r["model"] != row["model"]] + [row]
            counted = [r for r in rows if "left" in r]
            data = provenance(PACKAGES) | {
                "models": len(rows), "nothing_left": sum(not r["left"] for r in counted), "fewest": sum(r["fewest"] for r in counted), "rows": rows,
            }  # fmt: skip
            RESULT.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
