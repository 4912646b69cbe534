"""RandomNormal and related ops: random numbers. Refused: engines are deterministic."""

from whet.ops._refused import refuse

refuse(
    "RandomNormal",
    "it generates random numbers, but engines are deterministic; generate them outside the model and pass them as an input",
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
)
