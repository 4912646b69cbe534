"""Softmax of rows in place, scaled and masked on the way, by a kernel of our own: attention's middle.

exp is 2^n times a polynomial of what is left (Cephes' expf: relative error 2e-7); below -87.3 it is 0. A row in which there is a NaN or
plus infinity, or nothing but minus infinity, is NaN, as the op says.
"""

from __future__ import annotations

from functools import cache

from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.ir import FLOATS, WIDE, literal

_INTEGERS, _BITS = f"<{WIDE} x i32>", f"<{WIDE} x i1>"
#: log2(e), its inverse in two parts, where exp ends, 1.5 * 2^23 (adding it rounds), Cephes' coefficients
_NUMBERS = {
    "log2e": 1.44269504088896341, "high2": -0.693359375, "low2": 2.12194440e-4, "least": -87.3, "magic": 12582912.0, "zero": 0.0, "unit": 1.0,
    "c0": 1.9875691500e-4, "c1": 1.3981999507e-3, "c2": 8.3334519073e-3, "c3": 4.1665795894e-2, "c4": 1.6666665459e-1, "c5": 5.0000001201e-1,
}  # fmt: skip
WORDS = ("scores", "mask", "count", "keys", "rows", "head.step", "row.step", "share", "line")
"""The context of `softmax`: f32 rows and mask, rows of this call, length of one, rows of a head, elements from head to head and row to row of the
mask, rows of a thread, the scale's address."""


def _constant(name: str, value: float) -> str:
    return (
        f"  %{name}.one = insertelement {FLOATS} undef, float {literal(value)}, i32 0\n"
        f"  %{name} = shufflevector {FLOATS} %{name}.one, {FLOATS} undef, <{WIDE} x i32> zeroinitializer"
    )


def _fold(op: str, name: str, result: str) -> str:
    """All lanes of %name into each: `op` is fadd, or max."""
    lines, at = [], f"%{name}"
    for k, step in enumerate((8, 4, 2, 1)):
        order = ", ".join(f"i32 {(i + step) % WIDE}" for i in range(WIDE))
        lines.append(f"  %{name}.s{k} = shufflevector {FLOATS} {at}, {FLOATS} undef, <{WIDE} x i32> <{order}>")
        made = f"%{result}" if step == 1 else f"%{name}.f{k}"
        if op == "max":
            lines.append(f"  %{name}.g{k} = fcmp ogt {FLOATS} {at}, %{name}.s{k}")
            lines.append(f"  {made} = select {_BITS} %{name}.g{k}, {FLOATS} {at}, {FLOATS} %{name}.s{k}")
        else:
            lines.append(f"  {made} = fadd {FLOATS} {at}, %{name}.s{k}")
        at = made
    return "\n".join(lines)


_FIND_MASK = """
  %head = sdiv i64 %r, %rows
  %within = srem i64 %r, %rows
  %o.head = mul i64 %head, %head.step
  %o.row = mul i64 %within, %row.step
  %o = add i64 %o.head, %o.row
  %m.base = inttoptr i64 %mask to float*
  %m.row = getelementptr float, float* %m.base, i64 %o"""


@cache
def softmax_ir(masked: bool) -> str:
    """`softmax(context)`: rows whose length is a multiple of 16, three times over a row that lies in the first cache."""
    constants = "\n".join(_constant(n, v) for n, v in _NUMBERS.items())
    return f"""
declare {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS}, {FLOATS}, {FLOATS})
{jit.opening("softmax", WORDS, "count")}
  %line.f = inttoptr i64 %line to float*
  %scale.one = load float, float* %line.f
  %scale.in = insertelement {FLOATS} undef, float %scale.one, i32 0
  %scale = shufflevector {FLOATS} %scale.in, {FLOATS} undef, <{WIDE} x i32> zeroinitializer
  %base = inttoptr i64 %scores to float*
{constants}
  %bottom.one = insertelement {FLOATS} undef, float 0xFFF0000000000000, i32 0
  %bottom = shufflevector {FLOATS} %bottom.one, {FLOATS} undef, <{WIDE} x i32> zeroinitializer
  br label %rows.next
rows.next:
  %r = phi i64 [ %from, %start ], [ %r1, %row.done ]
  %left = icmp slt i64 %r, %end
  br i1 %left, label %row, label %done
row:
  %at = mul i64 %r, %keys
  %x = getelementptr float, float* %base, i64 %at
{_FIND_MASK if masked else ""}
{_largest(masked)}{_powers()}{_divided()}row.done:
  %r1 = add i64 %r, 1
  br label %rows.next
done:
  ret void
}}
"""


def _largest(masked: bool) -> str:
    """The row scaled and masked, in its place, and the largest of each lane."""
    add_mask = f"""
  %m.at = getelementptr float, float* %m.row, i64 %i
  %m.v = bitcast float* %m.at to {FLOATS}*
  %m = load {FLOATS}, {FLOATS}* %m.v, align 4
  %s = fadd {FLOATS} %scaled, %m"""
    return f"""  br label %largest
largest:
  %i = phi i64 [ 0, %row ], [ %i1, %largest ]
  %top = phi {FLOATS} [ %bottom, %row ], [ %top1, %largest ]
  %x.at = getelementptr float, float* %x, i64 %i
  %x.v = bitcast float* %x.at to {FLOATS}*
  %raw = load {FLOATS}, {FLOATS}* %x.v, align 4
  %scaled = fmul {FLOATS} %raw, %scale
{add_mask if masked else f"  %s = fadd {FLOATS} %scaled, %zero"}
  store {FLOATS} %s, {FLOATS}* %x.v, align 4
  %larger = fcmp ogt {FLOATS} %s, %top
  %top1 = select {_BITS} %larger, {FLOATS} %s, {FLOATS} %top
  %i1 = add i64 %i, {WIDE}
  %more = icmp slt i64 %i1, %keys
  br i1 %more, label %largest, label %found
"""


def _powers() -> str:
    """exp of the row less its largest, in its place, and the sum of each lane."""
    return f"""found:
{_fold("max", "top1", "most")}
  br label %power
power:
  %j = phi i64 [ 0, %found ], [ %j1, %power ]
  %sum = phi {FLOATS} [ %zero, %found ], [ %sum1, %power ]
  %y.at = getelementptr float, float* %x, i64 %j
  %y.v = bitcast float* %y.at to {FLOATS}*
  %y = load {FLOATS}, {FLOATS}* %y.v, align 4
  %d = fsub {FLOATS} %y, %most
  %n.m = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %d, {FLOATS} %log2e, {FLOATS} %magic)
  %n.i = bitcast {FLOATS} %n.m to {_INTEGERS}
  %n = fsub {FLOATS} %n.m, %magic
  %e1 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %n, {FLOATS} %high2, {FLOATS} %d)
  %e = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %n, {FLOATS} %low2, {FLOATS} %e1)
  %p1 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %c0, {FLOATS} %e, {FLOATS} %c1)
  %p2 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %p1, {FLOATS} %e, {FLOATS} %c2)
  %p3 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %p2, {FLOATS} %e, {FLOATS} %c3)
  %p4 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %p3, {FLOATS} %e, {FLOATS} %c4)
  %p5 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %p4, {FLOATS} %e, {FLOATS} %c5)
  %q = fmul {FLOATS} %e, %e
  %p6 = call {FLOATS} @llvm.fma.v{WIDE}f32({FLOATS} %p5, {FLOATS} %q, {FLOATS} %e)
  %p = fadd {FLOATS} %p6, %unit
  %p.i = bitcast {FLOATS} %p to {_INTEGERS}
  %n.up = shl {_INTEGERS} %n.i, <{", ".join(["i32 23"] * WIDE)}>
  %w.i = add {_INTEGERS} %p.i, %n.up
  %w.f = bitcast {_INTEGERS} %w.i to {FLOATS}
  %low = fcmp olt {FLOATS} %d, %least
  %w.n = select {_BITS} %low, {FLOATS} %zero, {FLOATS} %w.f
  %odd = fcmp uno {FLOATS} %d, %d
  %w = select {_BITS} %odd, {FLOATS} %d, {FLOATS} %w.n
  store {FLOATS} %w, {FLOATS}* %y.v, align 4
  %sum1 = fadd {FLOATS} %sum, %w
  %j1 = add i64 %j, {WIDE}
  %again = icmp slt i64 %j1, %keys
  br i1 %again, label %power, label %summed
"""


def _divided() -> str:
    """The row by its sum."""
    return f"""summed:
{_fold("fadd", "sum1", "all")}
  %inverse = fdiv {FLOATS} %unit, %all
  br label %divide
divide:
  %l = phi i64 [ 0, %summed ], [ %l1, %divide ]
  %z.at = getelementptr float, float* %x, i64 %l
  %z.v = bitcast float* %z.at to {FLOATS}*
  %z = load {FLOATS}, {FLOATS}* %z.v, align 4
  %z1 = fmul {FLOATS} %z, %inverse
  store {FLOATS} %z1, {FLOATS}* %z.v, align 4
  %l1 = add i64 %l, {WIDE}
  %yet = icmp slt i64 %l1, %keys
  br i1 %yet, label %divide, label %row.done
"""
