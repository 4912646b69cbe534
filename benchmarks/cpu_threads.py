"""The effect of external load on libgomp, and the setting that prevents it: ResNet-18's convolutions through oneDNN's C API, by ctypes.

`python benchmarks/cpu_threads.py [--seconds 2] [--out benchmarks/results/cpu/threads.json]` starts one child process per case,
because libgomp reads its environment once, when it is loaded. docs/design/threads.md has the decision and its numbers.
"""

import argparse
import ctypes as C
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from _record import provenance

TICK = os.sysconf("SC_CLK_TCK")
# : input channels, output channels, input size, kernel, stride, count: the convolutions of ResNet-18
RESNET18 = [
    (3, 64, 224, 7, 2, 1),
    (64, 64, 56, 3, 1, 4),
    (64, 128, 56, 3, 2, 1),
    (128, 128, 28, 3, 1, 3),
    (64, 128, 56, 1, 2, 1),
    (128, 256, 28, 3, 2, 1),
    (256, 256, 14, 3, 1, 3),
    (128, 256, 28, 1, 2, 1),
    (256, 512, 14, 3, 2, 1),
    (512, 512, 7, 3, 1, 3),
    (256, 512, 14, 1, 2, 1),
]
TINY = [(16, 16, 16, 3, 1, 60)]


class ExecArg(C.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = [("arg", C.c_int), ("memory", C.c_void_p)]


class Chain:
    """A list of FP32 convolutions in nhwc, run consecutively on separate buffers."""

    def __init__(self, lib: C.CDLL, shapes: list[tuple[int, ...]]) -> None:
        self.lib, self.steps, self.keep = lib, [], []
        self.engine, self.stream = C.c_void_p(), C.c_void_p()
        self._ok("engine_create", C.byref(self.engine), 1, C.c_size_t(0))
        self._ok("stream_create", C.byref(self.stream), self.engine, 1)
        for ci, co, size, k, stride, count in shapes:
            for _ in range(count):
                self._conv(ci, co, size, k, stride)

    def _ok(self, name: str, *args: object) -> None:
        status = getattr(self.lib, "dnnl_" + name)(*args)
        if status:
            raise RuntimeError(f"dnnl_{name} gave status {status}")

    def _md(self, dims: tuple[int, ...], tag: int) -> C.c_void_p:
        md = C.c_void_p()
        self._ok("memory_desc_create_with_tag", C.byref(md), len(dims), (C.c_int64 * 12)(*dims), 3, tag)
        return md

    def _memory(self, md: C.c_void_p | int) -> C.c_void_p:
        self.lib.dnnl_memory_desc_get_size.restype = C.c_size_t
        nbytes = self.lib.dnnl_memory_desc_get_size(C.c_void_p(getattr(md, "value", md)))
        data = np.full(nbytes // 4 + 16, 0.01, np.float32)
        memory = C.c_void_p()
        self._ok(
            "memory_create", C.byref(memory), C.c_void_p(getattr(md, "value", md)), self.engine, C.c_void_p(data.ctypes.data)
        )
        self.keep.append(data)
        return memory

    def _conv(self, ci: int, co: int, size: int, k: int, stride: int) -> None:
        out, pad = (size + stride - 1) // stride, k // 2
        src, dst = self._md((1, ci, size, size), 22), self._md((1, co, out, out), 22)
        weights, bias = self._md((co, ci, k, k), 1), self._md((co,), 2)
        two = C.c_int64 * 2
        desc, primitive = C.c_void_p(), C.c_void_p()
        self._ok(
            "convolution_forward_primitive_desc_create",
            C.byref(desc),
            self.engine,
            96,
            1,
            src,
            weights,
            bias,
            dst,
            two(stride, stride),
            two(0, 0),
            two(pad, pad),
            two(pad, pad),
            None,
        )
        self._ok("primitive_create", C.byref(primitive), desc)
        self.lib.dnnl_primitive_desc_query_md.restype = C.c_void_p
        packed = self.lib.dnnl_primitive_desc_query_md(desc, 131, 0)
        args = (ExecArg * 4)(*[ExecArg(a, self._memory(m).value) for a, m in ((1, src), (33, packed), (41, bias), (17, dst))])
        self.steps.append((primitive, self.stream, C.c_int(4), args))

    def run(self) -> None:
        """One pass over the chain."""
        execute = self.lib.dnnl_primitive_execute
        for step in self.steps:
            execute(*step)


def summary(times: list[float]) -> dict[str, float]:
    """Median and percentiles of seconds, in milliseconds."""
    values = np.sort(np.array(times)) * 1e3
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (10, 50, 90, 99)} | {"n": len(times)}


def peer(kind: str, threads: int):
    """A function that runs a small network of ONNX Runtime or OpenVINO in this process, with its own thread pool."""
    from onnx import TensorProto, helper, numpy_helper

    def info(name: str):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64, 56, 56])

    weights = [numpy_helper.from_array(np.full((64, 64, 3, 3), 0.01, np.float32), "w")]
    nodes = [helper.make_node("Conv", ["x" if i == 0 else f"t{i}", "w"], [f"t{i + 1}"], pads=[1, 1, 1, 1]) for i in range(4)]
    graph = helper.make_graph(nodes, "g", [info("x")], [info("t4")], weights)
    blob = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    x = np.zeros((1, 64, 56, 56), np.float32)
    if kind == "ort":
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"x": x})
    import openvino as ov

    core = ov.Core()
    model = core.compile_model(core.read_model(blob), "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
    return lambda: model({"x": x})


def raise_managed_threads(gomp: C.CDLL) -> None:
    """Gives libgomp more threads than there are CPUs (a second, sleeping pool), so that it uses its throttled spin count."""
    parked = threading.Event()
    body = C.CFUNCTYPE(None, C.c_void_p)(lambda _: None)

    def park() -> None:
        gomp.GOMP_parallel(body, None, C.c_uint(3), C.c_uint(0))
        parked.set()
        threading.Event().wait()

    threading.Thread(target=park, daemon=True).start()
    parked.wait()
    raise_managed_threads.keep = body


def child(case: dict) -> None:
    """Runs one case in this process and prints its times as JSON."""
    lib = C.CDLL(str(Path(sys.prefix) / "lib" / "libdnnl.so.3"))
    gomp = C.CDLL("libgomp.so.1")
    if case.get("late"):
        raise_managed_threads(gomp)
    chains = {"resnet18": Chain(lib, RESNET18), "tiny": Chain(lib, TINY)}
    for chain in chains.values():
        chain.run()
    other, stop = None, threading.Event()
    if case.get("peer"):
        other = peer(case["peer"], 2)
        other()
    if case.get("pin"):  # all threads on CPU 0 after libgomp counted two CPUs: main and worker share a core
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), {0})
    if other and case["use"] == "concurrent":

        def work() -> None:
            while not stop.is_set():
                other()

        threading.Thread(target=work, daemon=True).start()
    result = {}
    for name, chain in chains.items():
        times: list[float] = []
        end = time.perf_counter() + case["seconds"] * (1 if name == "resnet18" else 0.4)
        while time.perf_counter() < end or len(times) < 5:
            if other and case["use"] == "alternating":
                other()
            start = time.perf_counter()
            chain.run()
            times.append(time.perf_counter() - start)
        result[name] = summary(times[2:])
    stop.set()
    print(json.dumps(result), flush=True)
    os._exit(0)


def busy() -> float:
    """CPU seconds of all processes since boot."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(None, 4)[1:4])
    return (user + nice + system) / TICK


def cpu_of(pid: int) -> float:
    """CPU seconds of one living process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def measure(case: dict) -> dict:
    """Starts the case's burners and its child; returns the child's times and the CPU time of other processes."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(case["burners"])]
    try:
        time.sleep(0.1)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        before, start, burnt = busy(), time.perf_counter(), sum(cpu_of(b.pid) for b in burners)
        done = subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(case)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **case["env"]},
            timeout=120,
        )
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime + sum(cpu_of(b.pid) for b in burners) - burnt
        others = max(0.0, (busy() - before - own) / wall)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    times = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr[-500:]}
    return {**case, "others_cpu": round(others, 3), "disturbed": others > 0.05, **times}


def cases(seconds: float) -> list[dict]:
    """Every case: environment, load, and the other libraries in the process."""
    environments = {
        "default": {},
        "spin0": {"GOMP_SPINCOUNT": "0"},
        "spin200": {"GOMP_SPINCOUNT": "200"},
        "spin1000": {"GOMP_SPINCOUNT": "1000"},
        "spin2000": {"GOMP_SPINCOUNT": "2000"},
        "spin5000": {"GOMP_SPINCOUNT": "5000"},
        "spin30000": {"GOMP_SPINCOUNT": "30000"},
        "passive": {"OMP_WAIT_POLICY": "passive"},
        "active": {"OMP_WAIT_POLICY": "active"},
        "bind": {"OMP_PROC_BIND": "true"},
        "dynamic": {"OMP_DYNAMIC": "true"},
        "bind_spin1000": {"OMP_PROC_BIND": "true", "GOMP_SPINCOUNT": "1000"},
        "one_thread": {"OMP_NUM_THREADS": "1"},
    }
    base = [{"name": n, "env": e, "burners": b, "seconds": seconds} for b in (0, 1, 2) for n, e in environments.items()]
    pinned = [
        {"name": f"pinned_{n}", "env": environments[n], "burners": b, "pin": True, "seconds": seconds}
        for b in (0, 1)
        for n in ("default", "spin1000", "one_thread")
    ]
    late = [
        {"name": "late", "env": {}, "burners": b, "pin": p, "late": True, "seconds": seconds}
        for b, p in ((0, False), (1, False), (2, False), (0, True))
    ]
    pools = [
        {"name": f"{p}_{u}_{n}", "env": environments[n], "burners": b, "peer": p, "use": u, "seconds": seconds}
        for b in (0, 1)
        for p in ("ort", "openvino")
        for u in ("loaded", "alternating", "concurrent")
        for n in ("default", "spin1000")
        if not (b and u == "loaded")
    ]
    return base + pinned + late + pools


def main() -> None:
    """Runs all cases, or those whose name contains --only, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="comma-separated names; all cases if empty")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over the cases, each round in the same order")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu/threads.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(json.loads(args.child))
    rows = json.loads(args.out.read_text())["rows"] if args.append else []
    about = {k: v for k, v in provenance(()).items() if k in ("date", "commit")}  # rows that are kept may be of another commit
    for case in cases(args.seconds) * args.repeat:
        if not args.only or case["name"] in args.only.split(","):
            row = about | measure(case)
            if row["disturbed"]:  # repeated once; both stay in the file
                rows.append(row)
                row = about | measure(case)
            rows.append(row)
            print(
                row["name"],
                row["burners"],
                "burners; others",
                row["others_cpu"],
                row.get("resnet18"),
                row.get("tiny"),
                flush=True,
            )
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "cpu": next(
            (ln.split(":")[1].strip() for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln), ""
        ),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {**provenance(("numpy", "onnxruntime", "openvino", "onednn-cpu-gomp")), "machine": machine, "unit": "ms", "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
