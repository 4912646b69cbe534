"""RNN: h = f(W x + R h + b); outputs Y and the final h."""

from whet.ops._recurrent import clip_inputs, register_recurrent

register_recurrent(
    "RNN",
    1,
    1,
    lambda layer, from_x, r, rb, states, functions: (functions[0](clip_inputs(layer, from_x + states[0] @ r.T + rb)),),
    ("Tanh",),
    {},
    samples=[
        (["f32[4,2,3]", "const f32[1,5,3]", "const f32[1,5,5]", "const f32[1,10]"], {"hidden_size": 5}),
        (["f32[4,2,3]", "const f32[1,5,3]", "const f32[1,5,5]", None, None, "f32[1,2,5]"], {"hidden_size": 5, "activations": ("Relu",)}),
    ],
)
