"""Compiled objects are loaded without LLVM, or by LLVM where that is not possible."""

import ctypes
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from whet.backends.cpu import machine_code, object_file

pytest.importorskip("llvmlite")
needs_loader = pytest.mark.skipif(not object_file.can_load(), reason="objects are loaded without LLVM on Linux on x86-64")

IR = """
declare float @tanf(float)
@calls = internal global i64 40
@table = internal constant [3 x double] [double 1.5, double 2.5, double 4.0]

define float @tangent(float %x) {
  %v = call float @tanf(float %x)
  ret float %v
}

define i64 @count() {
  %old = load i64, i64* @calls
  %new = add i64 %old, 1
  store i64 %new, i64* @calls
  ret i64 %new
}

define double @entry_of(i64 %k) {
  %p = getelementptr [3 x double], [3 x double]* @table, i64 0, i64 %k
  %v = load double, double* %p
  ret double %v
}

define i64 @twice() {
  %a = call i64 @count()
  %b = call i64 @count()
  ret i64 %b
}
"""


def compile_ir(text):
    import llvmlite.binding as llvm

    machine, _ = machine_code.get_target()
    if llvm.llvm_version_info[0] >= 17:
        text = text.replace("i64* @", "ptr @").replace("[3 x double]* @", "ptr @").replace("double* %", "ptr %")
    return bytes(machine.emit_object(llvm.parse_assembly(text)))


@pytest.fixture(params=["loader", "LLVM"])
def functions(request):
    """The functions of IR as addresses by name, by either loader."""
    code = compile_ir(IR)
    if request.param == "LLVM":
        return machine_code.load_by_llvm(code)
    if not object_file.can_load():
        pytest.skip("objects are loaded without LLVM on Linux on x86-64")
    return object_file.load_object(code).__getitem__


def test_functions_data_and_functions_of_the_process(functions):
    tangent = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_float)(functions("tangent"))
    entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(functions("entry_of"))
    count, twice = (ctypes.CFUNCTYPE(ctypes.c_int64)(functions(name)) for name in ("count", "twice"))
    assert tangent(0.5) == pytest.approx(math.tan(0.5), rel=1e-6)
    assert [entry(k) for k in range(3)] == [1.5, 2.5, 4.0]
    assert (count(), twice(), count()) == (41, 43, 44)


@needs_loader
def test_code_cannot_be_written():
    address = object_file.load_object(compile_ir(IR))["twice"]
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (permissions,) = [r[1] for r in regions if int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16)]
    assert permissions.startswith("r-x")


@needs_loader
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda code: b"\x7fELF\x01" + code[5:], "not an object"),
        (lambda code: code[:18] + struct.pack("<H", 183) + code[20:], "not an object"),
        (lambda code: code[:-100], "damaged"),
        (lambda code: code.replace(b"tanf\0", b"xxxf\0"), "symbol 'xxxf'"),
    ],
    ids=["32 bits", "another machine", "cut", "unknown function"],
)
def test_what_cannot_be_loaded_is_refused(change, message):
    with pytest.raises(object_file.UnsupportedObject, match=message):
        object_file.load_object(change(compile_ir(IR)))


@needs_loader
def test_other_relocations_are_refused():
    """An object for the small code model has addresses relative to the instruction."""
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="small")
    code = bytes(machine.emit_object(llvm.parse_assembly("declare void @far()\ndefine void @near() {\n  call void @far()\n  ret void\n}")))
    with pytest.raises(object_file.UnsupportedObject, match="relocation"):
        object_file.load_object(code)


def test_llvm_loads_what_the_loader_refuses(monkeypatch):
    def refuse(code):
        raise object_file.UnsupportedObject("for this test")

    monkeypatch.setattr(object_file, "load_object", refuse)
    address = machine_code.load_function("define i64 @seven_of_llvm() {\n  ret i64 7\n}", "seven_of_llvm")
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == 7


@needs_loader
def test_kept_objects_need_no_compiler(tmp_path):
    """A second process runs an engine with several threads from the kept objects of the first: it compiles nothing and does not load LLVM."""
    text = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "src")!r})
import numpy as np, whet
context = whet.Runtime(threads=2).load(sys.argv[1]).create_context()
context.run({{"x": np.ones((1, 64, 64, 64), np.float32)}})
from whet.tactics.cpu._llvm import jit
print("llvmlite.binding" in sys.modules, jit.get_version())
"""
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.network import Network, parse_type

    net = Network("n")
    net.mark_output(net.add("Relu", net.add("Tan", net.add_input("x", parse_type("f32[1,64,64,64]")))))
    write_engine(build(net, BuildConfig(optimization_level=1, timing_cache="", threads=2)), tmp_path / "e.engine")
    environment = os.environ | {"WHET_CPU_CACHE": str(tmp_path / "objects")}
    lines, files = [], []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", text, str(tmp_path / "e.engine")]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=100)
        assert ended.returncode == 0, ended.stderr
        lines.append(ended.stdout.split(maxsplit=1))
        files.append(sorted(f.name for f in (tmp_path / "objects").iterdir()))
    assert (lines[0][0], lines[1][0]) == ("True", "False")
    assert lines[0][1] == lines[1][1]
    assert files[0] == files[1]


def test_the_compilers_version():
    import llvmlite.binding as llvm

    assert machine_code.get_compiler_version() == "LLVM " + ".".join(map(str, llvm.llvm_version_info))
