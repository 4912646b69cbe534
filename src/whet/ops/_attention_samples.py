"""Samples of attention as one fused layer: q, k and v apart or stacked, scaled or not, with masks that repeat along any axes."""

from __future__ import annotations

import numpy as np

from whet.network import Network, parse_type
from whet.ops._base import Sample


def attention(
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    size: int,
    *,
    lies: str = "heads",
    scale: str = "Div",
    mask: tuple[int, ...] = (),
    constant: bool = False,
) -> Sample:
    """softmax(q @ k^T / sqrt(size) + mask) @ v. `lies`: "heads" (q, k, v as they are multiplied), "rows" (heads within a row, as a
    projection leaves them; transposes are in the body, the result's too), "stacked" (all three in one tensor of rows)."""
    stacked: list[str | np.ndarray] = [f"f32[{batch},{rows},3,{heads},{size}]", np.array(0), np.array(1), np.array(2)]
    apart: list[str | np.ndarray] = [f"f32[{batch},{n},{heads},{size}]" for n in (rows, keys, keys)]
    plain: list[str | np.ndarray] = [f"f32[{batch},{heads},{a},{b}]" for a, b in ((rows, size), (size, keys), (keys, size))]
    inputs: list[str | np.ndarray | None] = [*{"heads": plain, "rows": apart, "stacked": stacked}[lies]]
    number = size**0.5 if scale == "Div" else size**-0.5
    inputs += [np.array(number, np.float32)] if scale else []
    inputs += [f"{'const ' if constant else ''}f32[{','.join(map(str, mask))}]"] if mask else []

    def regions() -> dict[str, Network]:
        body = Network("body", "lowered")
        types = [f"{'i64' if t.dtype.kind == 'i' else 'f32'}[]" if isinstance(t, np.ndarray) else str(t).split()[-1] for t in inputs]
        own = [body.add_input(f"i{n}", parse_type(t)) for n, t in enumerate(types)]
        rest = own[4 if lies == "stacked" else 3 :]
        if lies == "heads":
            q, k, v = own[:3]
        elif lies == "rows":
            q, k, v = (body.add("Transpose", t, perm=perm) for t, perm in zip(own[:3], ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True))
        else:
            x = body.add("Transpose", own[0], perm=(2, 0, 3, 1, 4))
            q, k, v = (body.add("Gather", x, i, axis=0) for i in own[1:4])
            k = body.add("Transpose", k, perm=(0, 1, 3, 2))
        x = body.add("MatMul", q, k)
        if scale:
            x = body.add(scale, x, rest[0])
        if mask:
            x = body.add("Add", x, rest[-1])
        y = body.add("MatMul", body.add("Softmax", x, axis=-1), v)
        body.mark_output(y if lies == "heads" else body.add("Transpose", y, perm=(0, 2, 1, 3)))
        return {"body": body}

    return Sample(inputs, {"composite": "Attention"}, regions)


SAMPLES = [
    attention(2, 3, 24, 40, 64, mask=(2, 1, 1, 40)),
    attention(1, 2, 33, 33, 64, lies="rows", scale="Mul", mask=(1, 1, 33, 33)),
    attention(2, 2, 50, 50, 32, lies="stacked", scale="Mul"),
    attention(4, 3, 49, 49, 32, lies="stacked", mask=(1, 3, 49, 49), constant=True),
    attention(1, 2, 20, 150, 80, lies="rows", scale=""),
    attention(1, 1, 70, 9, 128, lies="rows", mask=(9,)),
    attention(1, 2, 90, 150, 64, lies="rows"),
    attention(2, 2, 18, 32, 16, mask=(2, 1, 18, 32)),
]
