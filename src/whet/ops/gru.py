"""GRU: gates in ONNX's order z, r, h; outputs Y and the final h. `linear_before_reset` is PyTorch's and cuDNN's variant."""

import numpy as np

from whet.ops._recurrent import clip_inputs, register_recurrent


def step(layer, from_x, r, rb, states, functions):
    (h,) = states
    f, g = functions
    n = h.shape[1]
    z, reset = (f(clip_inputs(layer, v)) for v in np.split(from_x[:, : 2 * n] + h @ r[: 2 * n].T + rb[: 2 * n], 2, axis=1))
    if layer.attrs["linear_before_reset"]:
        new = from_x[:, 2 * n :] + reset * (h @ r[2 * n :].T + rb[2 * n :])
    else:
        new = from_x[:, 2 * n :] + (reset * h) @ r[2 * n :].T + rb[2 * n :]
    return ((1 - z) * g(clip_inputs(layer, new)) + z * h,)


register_recurrent(
    "GRU",
    3,
    1,
    step,
    ("Sigmoid", "Tanh"),
    {"linear_before_reset": 0},
    samples=[
        (["f32[4,2,3]", "const f32[1,15,3]", "const f32[1,15,5]", "const f32[1,30]"], {"hidden_size": 5}),
        (
            ["f32[4,2,3]", "const f32[1,15,3]", "const f32[1,15,5]", "const f32[1,30]", None, "f32[1,2,5]"],
            {"hidden_size": 5, "linear_before_reset": 1},
        ),
        (
            ["f32[6,3,18]", "const f32[2,99,18]", "const f32[2,99,33]", "const f32[2,198]", None, "f32[2,3,33]"],
            {"linear_before_reset": 1, "direction": "bidirectional"},
        ),
        (
            ["f32[6,3,18]", "const f32[2,99,18]", "const f32[2,99,33]", "const f32[2,198]", np.array([4, 6, 1], np.int32), "f32[2,3,33]"],
            {"hidden_size": 33, "direction": "bidirectional"},
        ),
    ],
)
