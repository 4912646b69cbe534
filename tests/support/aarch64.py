"""whet's CPU kernels as an AArch64 machine would compile them, run by Unicorn (QEMU's core as a library).

    python -m support.aarch64 [--cpu=neoverse-n1|generic] [SECONDS [tactic ...]]

runs in its own process, because it makes whet believe that this machine is an ARM one: /proc/cpuinfo lists a
Neoverse N1, or a first 64-bit ARM CPU without its later instructions (generic), and oneDNN cannot be loaded.
It prints one JSON object per tactic: how many samples were computed, and the failure, if any; at last the number of compiled modules.
The emulated code shares this process's memory: operands are at the same addresses.

One thread: an emulated CPU translates exclusive loads and stores for itself alone, so that two of them would not synchronize.
"""

from __future__ import annotations

import ctypes as C
import json
import math
import mmap
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import unicorn
from unicorn import arm64_const as arm

_FIRST = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
#: /proc/cpuinfo's features
FEATURES = {"neoverse-n1": f"{_FIRST} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs", "generic": _FIRST}
TARGETS = {"neoverse-n1": "", "generic": "+neon", "neoverse-v1": "+neon,+sve"}
_STACK = 1 << 20
_CALL, _JUMP, _ABSOLUTE = 283, 282, 257  # relocations R_AARCH64_*
_MOVES = {263: 0, 264: 0, 265: 16, 266: 16, 267: 32, 268: 32, 269: 48}  # R_AARCH64_MOVW_UABS_G*: shift
_RETURN = 0xD65F03C0


def _float_function(name, kind, count):
    def call(machine):
        registers = arm.UC_ARM64_REG_S0 if kind == "f" else arm.UC_ARM64_REG_D0
        own = getattr(C.CDLL("libm.so.6"), name)
        own.restype = C.c_float if kind == "f" else C.c_double
        own.argtypes = [own.restype] * count
        form, word = ("<f", "<I") if kind == "f" else ("<d", "<Q")
        given = [struct.unpack(form, struct.pack(word, machine.reg_read(registers + k)))[0] for k in range(count)]
        machine.reg_write(registers, struct.unpack(word, struct.pack(form, own(*given)))[0])

    return call


def _memory_function(name):
    def call(machine):
        a, b, n = (machine.reg_read(arm.UC_ARM64_REG_X0 + k) for k in range(3))
        getattr(C, name)(a, b, n)

    return call


_FUNCTIONS = (
    "sin", "cos", "tan", "exp", "log", "exp2", "log2", "log10", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "erf", "erfc", "expm1", "log1p",
)  # fmt: skip
#: What the C library offers to kernels on every ARM machine
EXTERNAL = (
    {f"{n}{end}": _float_function(f"{n}{end}", end or "d", 1) for n in _FUNCTIONS for end in ("", "f")}
    | {f"{n}{end}": _float_function(f"{n}{end}", end or "d", 2) for n in ("pow", "fmod", "atan2") for end in ("", "f")}
    | {"memcpy": _memory_function("memmove"), "memmove": _memory_function("memmove"), "memset": _memory_function("memset")}
)  # fmt: skip


class UnknownSymbol(Exception):
    """An object needs a function that is not in EXTERNAL, or a relocation that no linker of this file writes."""


def compile_for(ir: str, cpu: str) -> bytes:
    """The AArch64 object of a module. LLVM would end the process for intrinsics of another CPU, which are refused here."""
    import llvmlite.binding as llvm

    from whet.backends.cpu import machine_code

    if "llvm.x86." in ir:
        raise UnknownSymbol(f"an intrinsic of x86: {ir[ir.index('llvm.x86.') :][:40]}")
    machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu=cpu, features=TARGETS[cpu], opt=3, jit=True)
    module = llvm.parse_assembly(machine_code.use_opaque_pointers(ir) if llvm.llvm_version_info[0] >= 17 else ir)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    return bytes(machine.emit_object(module))


def list_undefined(code: bytes) -> set[str]:
    """Symbols that an object takes from outside."""
    from whet.backends.cpu import object_file as elf

    sections = elf.list_sections(code)
    symbols = next((elf.list_symbols(code, sections, s) for s in sections if s.kind == elf.SYMBOLS), [])
    return {s.name for s in symbols if s.section == 0 and s.name}


class Emulator:
    """One AArch64 CPU whose memory is this process's."""

    def __init__(self) -> None:
        self.machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.machine.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)  # the default is a Cortex-A57, without sdot
        self.mapped: set[int] = set()  # pages
        self.machine.hook_add(unicorn.UC_HOOK_MEM_UNMAPPED, self._map_more)
        self.stack, self.outside = self._allocate(_STACK), self._allocate(mmap.PAGESIZE)
        self.exit = self.outside  # where functions return to
        self.stubs: dict[str, int] = {}
        self.machine.hook_add(unicorn.UC_HOOK_CODE, self._call_external, begin=self.outside + 8, end=self.outside + mmap.PAGESIZE - 1)
        self.failure: BaseException | None = None

    def _allocate(self, nbytes: int) -> int:
        libc = C.CDLL(None)
        libc.mmap.restype, libc.mmap.argtypes = C.c_void_p, [C.c_void_p, C.c_size_t, C.c_int, C.c_int, C.c_int, C.c_long]
        return libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    def _map_more(self, machine, access, address, size, value, data) -> bool:
        """Maps the pages of this process around an address, if there are any."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(t, 16) for t in line.split()[0].split("-"))
            if start <= address < end and line.split()[1].startswith("r"):
                break
        else:
            return False
        page = mmap.PAGESIZE
        first = last = address // page * page
        while last + page < end and last + page not in self.mapped and last - first < 1 << 22:
            last += page
        self.mapped.update(range(first, last + page, page))
        machine.mem_map_ptr(first, last + page - first, unicorn.UC_PROT_ALL, C.c_void_p(first))
        return True

    def _call_external(self, machine, address, size, data) -> None:
        if name := next((n for n, at in self.stubs.items() if at == address), None):
            EXTERNAL[name](machine)

    def find_stub(self, name: str) -> int:
        if name not in EXTERNAL:
            raise UnknownSymbol(f"the function {name!r}")
        if name not in self.stubs:
            self.stubs[name] = at = self.outside + 8 * (len(self.stubs) + 1)
            C.c_uint32.from_address(at).value = _RETURN
        return self.stubs[name]

    def load(self, code: bytes) -> dict[str, int]:
        """Links an object into memory; the addresses of its functions."""
        from whet.backends.cpu import object_file as elf

        sections = elf.list_sections(code)
        symbols = next(elf.list_symbols(code, sections, s) for s in sections if s.kind == elf.SYMBOLS)
        loaded = {k: s for k, s in enumerate(sections) if s.flags & elf.ALLOCATED and s.name != elf.UNWIND and s.size}
        offsets, nbytes = elf.place_sections(loaded)
        base = self._allocate(nbytes + mmap.PAGESIZE)
        veneers = base + nbytes  # far calls: ldr x16, 8; br x16; address
        at = {k: base + o for k, o in offsets.items()}
        for k, s in loaded.items():
            if s.kind != elf.NO_BITS:
                C.memmove(at[k], code[s.offset : s.offset + s.size], s.size)
        for table in (s for s in sections if s.kind == elf.RELOCATIONS and s.info in at):
            for k in range(table.size // 24):
                offset, info, addend = struct.unpack_from("<QQq", code, table.offset + 24 * k)
                symbol, kind, place = symbols[info >> 32], info & 0xFFFFFFFF, at[table.info] + offset
                value = (at[symbol.section] + symbol.value if symbol.section in at else self.find_stub(symbol.name)) + addend
                if kind == _ABSOLUTE:
                    C.c_uint64.from_address(place).value = value
                elif kind in _MOVES:
                    C.c_uint32.from_address(place).value |= (value >> _MOVES[kind] & 0xFFFF) << 5
                elif kind in (_CALL, _JUMP):
                    if abs(value - place) >= 1 << 27:
                        C.memmove(veneers, struct.pack("<IIQ", 0x58000050, 0xD61F0200, value), 16)
                        value, veneers = veneers, veneers + 16
                    C.c_uint32.from_address(place).value |= (value - place) >> 2 & 0x3FFFFFF
                else:
                    raise UnknownSymbol(f"relocation {kind}")
        return {s.name: at[s.section] + s.value for s in symbols if s.name and s.section in at}

    def call(self, function: int, *words: int) -> int:
        """Calls a function with integer arguments."""
        machine = self.machine
        for k, word in enumerate(words):
            machine.reg_write(arm.UC_ARM64_REG_X0 + k, word)
        machine.reg_write(arm.UC_ARM64_REG_SP, self.stack + _STACK - 64)
        machine.reg_write(arm.UC_ARM64_REG_X30, self.exit)
        machine.emu_start(function, self.exit)
        return machine.reg_read(arm.UC_ARM64_REG_X0)


def become_arm(emulator: Emulator, cpu: str, modules: dict[str, int]) -> None:
    """Lets whet compile for `cpu` and run its kernels by the emulator; `modules` counts the bytes of each module's object."""
    from whet.backends.cpu import info, machine_code
    from whet.errors import BackendError
    from whet.tactics.cpu._llvm import jit
    from whet.tactics.cpu.onednn._api import library

    folder = tempfile.mkdtemp()
    info.CPUINFO = Path(folder, "cpuinfo")
    info.CPUINFO.write_text(f"processor\t: 0\nFeatures\t: {FEATURES[cpu]}\n")
    info.read_cpuinfo.cache_clear()
    jit.has.cache_clear()
    platform.machine = lambda: "aarch64"
    linked: dict[str, dict[str, int]] = {}

    def refuse(*_):
        raise BackendError("oneDNN has no package for this platform")

    def load(ir):
        text = str(ir)
        if text not in linked:
            code = compile_for(text, cpu)
            modules[text] = len(code)
            linked[text] = emulator.load(code)
        return linked[text].__getitem__

    library.Library = refuse
    library.load_library.cache_clear()
    library.load_error.cache_clear()
    machine_code.load_object = load
    jit.ParallelCall.run = lambda self: emulator.call(*self.native) and None


def list_layers(tactic):
    """(name, layer, arrays) of the samples of a tactic's ops, and of conversions of images between formats, which have none."""
    from test_cpu_contract import layer_of, samples_of
    from test_interleave_image import reformat_layer

    for name, k in samples_of(tactic):
        yield f"{name} {k}", *layer_of(name, k)
    for dtype in ("f32", "bf16") if "Reformat" in tactic.ops else ():
        layer = reformat_layer((2, 3, 9, 15), dtype)
        yield f"Reformat {dtype}", layer, [np.random.default_rng(0).standard_normal((2, 3, 9, 15)).astype(np.float32)]


def run_tactics(names: list[str], seconds: float) -> None:
    """Every compiled tactic on the samples that it accepts on this machine. After `seconds` only on the first one of each op and composite."""
    import test_onednn_tactics as contract

    from whet.backends.cpu import CpuBackend
    from whet.tactics.cpu._llvm.kernel import CompiledTactic

    contract.CPU = CpuBackend(threads=1)
    for tactic in contract.TACTICS:
        if not isinstance(tactic, CompiledTactic) or (names and tactic.name not in names):
            continue
        result: dict = {"tactic": tactic.name, "computed": 0, "refused": tactic.unavailable() or tactic.missing_library()}
        start = perf_counter()
        kinds: set[str] = set()
        for name, layer, arrays in list_layers(tactic) if result["refused"] is None else ():
            kind = layer.composite or layer.op
            if perf_counter() - start > seconds and kind in kinds:
                result["stopped"] = True
                continue
            try:
                if count := contract.check(layer, arrays, [tactic]):
                    result["computed"] += count
                    kinds.add(kind)
            except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a line of the report
                result.setdefault("failures", []).append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        result["kinds"] = len(kinds)
        result["seconds"] = round(perf_counter() - start, 2)
        print(json.dumps(result), flush=True)


def compile_all(modules: dict[str, int], ran_on: str) -> None:
    """The modules that ran and those of the backend, for every CPU of TARGETS that has their instructions."""
    from whet.backends.cpu import _pool_ir, fault, loop, workers
    from whet.tactics.cpu._llvm.work_stealing import emit_team_ir

    texts = [*modules, _pool_ir.emit_pool_ir("aarch64"), fault.HANDLER_IR, loop.IR, workers.IR, emit_team_ir()]
    undefined: set[str] = set()
    for k, text in enumerate(texts):
        for cpu in TARGETS if k % 8 == 0 or k >= len(modules) else [ran_on]:
            if cpu == "generic" and "neon.sdot" in text:
                continue
            undefined |= list_undefined(compile_for(text, cpu))
    print(json.dumps({"modules": len(texts), "ran": len(modules), "undefined": sorted(undefined - set(EXTERNAL))}), flush=True)


def main() -> None:
    os.environ["WHET_THREAD_POOL"] = "gomp"
    os.environ["WHET_CPU_CACHE"] = ""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    arguments = [a for a in sys.argv[1:] if not a.startswith("--cpu=")]
    cpu = next((a.removeprefix("--cpu=") for a in sys.argv[1:] if a.startswith("--cpu=")), "neoverse-n1")
    modules: dict[str, int] = {}
    become_arm(Emulator(), cpu, modules)
    run_tactics(arguments[1:], float(arguments[0]) if arguments else math.inf)
    compile_all(modules, cpu)


if __name__ == "__main__":
    main()
