"""NonMaxSuppression: boxes that do not overlap better ones. Refused: the shape of its output is in the data."""

from whet.ops._refused import refused

refused(
    "NonMaxSuppression",
    "how many boxes it keeps depends on the data, and an engine needs shapes before; end the model at boxes and scores, and suppress in your program",
)
