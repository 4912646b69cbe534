"""Argument structures: the compiler's layout equals the packed bytes for every description, with and without each optional part."""

import struct
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Annotated

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import compile as compiler
from whet.backends.cuda.compile import compile_cubin
from whet.errors import BackendError
from whet.tactics import load_tactics
from whet.tactics.cuda._device.arguments import (
    STRUCTURES,
    Arguments,
    ConstPointer,
    Fields,
    Float32,
    Int32,
    Int64,
    Pointer,
    SharedMemory,
    TensorMap,
    When,
    make_array_type,
)
from whet.tactics.cuda._device.kernel import launch
from whet.tactics.cuda._device.source import list_kernel_paths

load_tactics("cuda")
DESCRIBED = {f"{name} {struct_name}": cls for name, classes in STRUCTURES.items() for struct_name, cls in classes.items()}
# types that a structure uses in addition to those of common.cuh, as declared in its kernel file
TYPES = {
    "attention.cu": "struct Place { long long batch, head, row; };",
    "elementwise.cu": "struct Operand { const u8* at; int kind, type; u32 outer, stride, inner, count; };",
}

try:
    compiler.load_nvrtc()
    CAN_COMPILE = True
except BackendError:
    CAN_COMPILE = False


def combinations_of(macros):
    """Combinations of macros: none, each one by itself, all together."""
    return dict.fromkeys(chain(combinations(macros, 0), combinations(macros, 1), [tuple(macros)]))


@pytest.mark.skipif(not CAN_COMPILE, reason="no NVRTC here")
@pytest.mark.parametrize("name", DESCRIBED)
def test_compiled_layout_equals_packed_bytes(name):
    cls = DESCRIBED[name]
    text = [list_kernel_paths()["common.cuh"].read_text(), TYPES.get(cls.kernel_file, ""), "#define OFFSET(s, m) __INTADDR__(&((s*)0)->m)"]
    for i, macros in enumerate(combinations_of(cls.macros())):
        offsets, size = cls.layout(macros)
        checks = [f'static_assert(OFFSET({cls.struct_name}, {m}) == {at}, "{m}");' for m, at in offsets.items()]
        checks.append(f'static_assert(sizeof({cls.struct_name}) == {size}, "size");')
        defined, undefined = [f"#define {m} 1" for m in macros], [f"#undef {m}" for m in macros]
        text += [*defined, f"namespace n{i} {{", cls.c_struct(), *checks, "}", *undefined]
    compile_cubin("\n".join([*text, 'extern "C" __global__ void probe() {}']), name="probe.cu")


def test_every_kernel_includes_its_described_arguments():
    for name, path in list_kernel_paths().items():
        if path.suffix == ".cu":
            assert '#include "arguments"' in path.read_text(), f"{name} declares its arguments by hand"
            assert name in STRUCTURES, f"{name} has no class Arguments"


@dataclass(frozen=True)
class Scales(Fields):
    factor: ConstPointer
    step: Float32


@dataclass(frozen=True)
class Sample(Arguments, kernel="sample.cu"):
    count: Int32
    map: TensorMap
    out: Pointer
    sizes: Annotated[tuple[int, ...], make_array_type("int", 3)]
    scales: Annotated[Scales | None, When("IN8")] = None
    more: Annotated[Int64 | None, When("MORE")] = None


@pytest.fixture(autouse=True, scope="module")
def _forget_the_sample():
    yield
    STRUCTURES.pop("sample.cu", None)


def test_values_are_at_the_offsets_of_the_layout():
    sample = Sample(7, bytes(range(128)), 0x1234, (1, -2, 3), Scales(0x99, 0.5))
    offsets, size = Sample.layout(("IN8",))
    packed = sample.pack()
    assert (len(packed), offsets["map"]) == (size, 64), "tensor maps begin at multiples of 64 bytes"
    assert packed[64:192] == bytes(range(128))
    assert struct.unpack_from("<i", packed, offsets["count"]) == (7,)
    assert struct.unpack_from("<3i", packed, offsets["sizes"]) == (1, -2, 3)
    assert struct.unpack_from("<Qf", packed, offsets["factor"]) == (0x99, 0.5)
    assert "more" not in offsets
    assert len(Sample(7, bytes(128), 0, (0, 0, 0)).pack()) == Sample.layout()[1]


def test_the_text_of_a_structure():
    lines = [line.strip() for line in Sample.c_struct().splitlines()]
    assert lines == [
        "struct Args {", "int count;", "TensorMap map;", "u8* out;", "int sizes[3];",
        "#if IN8", "const u8* factor;", "float step;", "#endif", "#if MORE", "long long more;", "#endif", "};",
    ]  # fmt: skip


def test_wrong_values_are_refused():
    with pytest.raises(struct.error):
        Sample(7, bytes(128), 0, (1, 2)).pack()
    with pytest.raises(struct.error):
        Sample(2**31, bytes(128), 0, (1, 2, 3)).pack()


def test_arguments_must_be_those_of_the_instance():
    with pytest.raises(BackendError, match="the arguments of IN8=4 are missing"):
        launch("f", Sample(7, bytes(128), 0, (1, 2, 3)), {"IN8": 4}, (1, 1, 1), 32)
    with pytest.raises(BackendError, match="the arguments of MORE=0 were given"):
        launch("f", Sample(7, bytes(128), 0, (1, 2, 3), more=1), {}, (1, 1, 1), 32)


def test_a_structure_is_described_once():
    with pytest.raises(BackendError, match=r"sample\.cu has two descriptions of its structure Args: Sample and Other"):
        type("Other", (Arguments,), {}, kernel="sample.cu")


def test_regions_of_shared_memory_are_aligned_and_in_order():
    shared = SharedMemory().region("ring", 1000).region("tile", 64, alignment=128).region("barriers", 16, alignment=8)
    assert shared.constants() == {"SHARED_RING": 0, "SHARED_TILE": 1024, "SHARED_BARRIERS": 1088, "SHARED_END": 1104}
    assert shared.nbytes == 1104 + 1024, "the base is aligned by the kernel"
    with pytest.raises(BackendError, match="two regions called ring"):
        shared.region("ring", 4)
