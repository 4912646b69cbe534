"""RandomNormal and its kin: random numbers. Refused: an engine gives the same outputs for the same inputs."""

from whet.ops._refused import refused

refused(
    "RandomNormal",
    "it makes random numbers, and an engine gives the same outputs for the same inputs; make them in your program and feed them as an input",
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"),
)
