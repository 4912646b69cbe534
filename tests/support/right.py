"""Whole networks through `whet exec`, and the error of their outputs against float64.

Criterion for a whole network: error against float64, max over outputs of ||e||/||ref|| and max|e|/max|ref|, at most 4 times
ONNX Runtime's own, with a floor of 1e-5. The outputs compared are those that the command wrote; scores are computed with the
engine file that it saved.
"""

from pathlib import Path

import numpy as np
import onnxruntime as ort

from support.commands import run_command
from whet.frontends import network_from_onnx
from whet.ops import run_network

FLOOR = 1e-5
QUICK = "--avgTiming=2 --numThreads=2 --warmUp=0 --duration=0 --iterations=1"


def relative_error(got: dict, want: dict) -> float:
    """Max over outputs of both norms' relative errors."""
    worst = 0.0
    for name, ref in want.items():
        e = np.asarray(got[name], np.float64) - ref
        for norm in (np.linalg.norm, lambda a: np.abs(a).max(initial=0.0)):
            scale = float(norm(ref.reshape(-1)))
            worst = max(worst, float(norm(e.reshape(-1))) / scale if scale else float(norm(e.reshape(-1))))
    return worst


def onnxruntime_outputs(session: ort.InferenceSession, feeds: dict) -> dict:
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def whet_exec(model: Path, feeds: dict[str, np.ndarray], folder: Path, level: int, *, dynamic: bool) -> tuple[Path, dict[str, np.ndarray]]:
    """The engine file that the command saved, and its outputs for `feeds`."""
    files = []
    for k, (name, a) in enumerate(feeds.items()):
        np.save(folder / f"in{k}.npy", a)
        files.append(f"'{name}':in{k}.npy")
    command = [f"--onnx={model.resolve()}", f"--builderOptimizationLevel={level}", *QUICK.split(), "--saveEngine=m.engine"]
    command += ["--dumpRawBindingsToFile", "--loadInputs=" + ",".join(files)]
    if dynamic:
        command.append("--shapes=" + ",".join(f"'{n}':{'x'.join(map(str, a.shape)) or 'scalar'}" for n, a in feeds.items()))
    code, said = run_command("exec", *command, cwd=folder, environment={"XDG_CACHE_HOME": str(folder / "cache")})
    assert code == 0, said[-6000:]
    assert "&&&& PASSED" in said
    outputs = {}
    for path in folder.glob("*.raw"):
        name, _, shape, dtype, _ = path.name.rsplit(".", 4)
        outputs[name] = np.fromfile(path, dtype).reshape([int(d) for d in shape.split("x") if d])
    return folder / "m.engine", outputs


def judged(model: Path, feeds: dict, folder: Path, level: int = 2):
    """Runs the command and compares its outputs with float64; returns the saved engine and ONNX Runtime's session."""
    net = network_from_onnx(model)
    engine, got = whet_exec(model, feeds, folder, level, dynamic=any(not t.type.static for t in net.inputs))
    want = run_network(net, feeds, widen=True)
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    theirs = onnxruntime_outputs(session, feeds)
    by_file = {"".join(c if c.isalnum() or c in "._-" else "_" for c in n): n for n in want}
    assert sorted(got) == sorted(by_file)
    assert relative_error({by_file[f]: a for f, a in got.items()}, want) <= max(4 * relative_error(theirs, want), FLOOR)
    return engine, session
