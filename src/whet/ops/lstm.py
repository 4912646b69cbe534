"""LSTM: gates in ONNX's order i, o, f, c; outputs Y, the final h and the final c. Input 7 holds peepholes."""

import numpy as np

from whet.ops._recurrent import clip_inputs, register_recurrent


def step(layer, from_x, r, rb, states, functions, extra=None):
    h, c = states
    f, g, k = functions
    i, o, forget, new = np.split(from_x + h @ r.T + rb, 4, axis=1)
    peepholes = (None,) * 3 if extra is None else np.split(extra, 3)

    def apply_gate(x, peephole, cell):
        """Without a peephole an infinite cell must not become NaN, as 0 times infinity is."""
        return f(clip_inputs(layer, x if peephole is None else x + peephole * cell))

    i = apply_gate(i, peepholes[0], c)
    forget = 1 - i if layer.attrs["input_forget"] else apply_gate(forget, peepholes[2], c)
    c = forget * c + i * g(clip_inputs(layer, new))
    o = apply_gate(o, peepholes[1], c)
    return o * k(c), c


_WAVE = (0.1 * np.sin(np.arange(512 * 128))).reshape(1, 512, 128).astype(np.float32)  # numpy.random would be imported by every process

register_recurrent(
    "LSTM",
    4,
    2,
    step,
    ("Sigmoid", "Tanh", "Tanh"),
    {"input_forget": 0},
    samples=[
        (["f32[4,2,3]", "const f32[1,20,3]", "const f32[1,20,5]", "const f32[1,40]"], {"hidden_size": 5}),
        (
            ["f32[3,2,4]", "const f32[2,12,4]", "const f32[2,12,3]", "const f32[2,24]", None, "f32[2,2,3]", "f32[2,2,3]"],
            {"hidden_size": 3, "direction": "bidirectional"},
        ),
        (["f32[1,1,6]", "const f32[1,8,6]", "const f32[1,8,2]", None, None, "f32[1,1,2]", "f32[1,1,2]"], {"direction": "reverse"}),
        (["f32[5,3,2]", "const f32[1,8,2]", "const f32[1,8,2]", "const f32[1,16]", np.array([5, 2, 3], np.int32)], {"hidden_size": 2}),
        (["f32[3,2,2]", "const f32[1,8,2]", "const f32[1,8,2]", "const f32[1,16]", None, None, None, "const f32[1,6]"], {"hidden_size": 2}),
        (
            ["f32[9,2,21]", "const f32[2,76,21]", "const f32[2,76,19]", "const f32[2,152]", None, np.zeros((2, 2, 19), np.float32), "f32[2,2,19]"],
            {"direction": "bidirectional"},
        ),
        (["f32[2,7,5]", "const f32[1,80,5]", "const f32[1,80,20]", "const f32[1,160]", None, "f32[2,1,20]"], {"layout": 1, "direction": "reverse"}),
        (["extreme f32[2,2,16]", "const f32[1,8,16]", "const f32[1,8,2]"], {"hidden_size": 2}),
        (["f32[3,1,8]", "const f32[1,512,8]", _WAVE], {"hidden_size": 128}),
        (
            ["f32[9,2,21]", "const f32[2,76,21]", "const f32[2,76,19]", "const f32[2,152]", np.array([9, 6], np.int32), None, "f32[2,2,19]"],
            {"hidden_size": 19, "direction": "bidirectional"},
        ),
    ],
)
