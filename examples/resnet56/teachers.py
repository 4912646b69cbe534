"""Two fine-tuned networks as one teacher: the mean of their logits, which is more accurate than either.

    python examples/resnet56/teachers.py OUT       # OUT/original.tuned.onnx and OUT/gpu128-50.tuned.onnx -> OUT/teachers.tuned.onnx

The step `tune` of run.py creates it when a variant needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

TEACHERS = ("original", "gpu128-50")  # the uncut network and the most accurate cut, whose errors differ
FILE = "teachers.tuned.onnx"


def write(out: Path) -> None:
    """Writes OUT/teachers.tuned.onnx unless it exists."""
    if (out / FILE).exists():
        return
    if missing := [f"{n}.tuned.onnx" for n in TEACHERS if not (out / f"{n}.tuned.onnx").exists()]:
        raise SystemExit(f"{out} has no {' and no '.join(missing)}: fine-tune {' and '.join(TEACHERS)} first (run.py --steps prune,tune)")
    (out / FILE).write_bytes(mean([out / f"{n}.tuned.onnx" for n in TEACHERS]))


def mean(files: list[Path]) -> bytes:
    """An ONNX model whose output is the mean of the outputs of several models with one input and one output each."""
    import onnx
    from onnx import helper
    from onnx.compose import add_prefix_graph

    models = [onnx.load(f) for f in files]
    graphs = [add_prefix_graph(m.graph, f"{i}/", rename_inputs=False) for i, m in enumerate(models)]
    (x,), out = (t for t in graphs[0].input if t.name not in {w.name for w in graphs[0].initializer}), models[0].graph.output[0]
    outputs = [g.output[0].name for g in graphs]
    nodes = [n for g in graphs for n in g.node] + [helper.make_node("Mean", outputs, [out.name])]
    merged = helper.make_graph(nodes, "teachers", [x], [out], [w for g in graphs for w in g.initializer])
    return helper.make_model(merged, opset_imports=models[0].opset_import, ir_version=models[0].ir_version).SerializeToString()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
