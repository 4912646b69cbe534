"""NonMaxSuppression: boxes that do not overlap higher-scoring ones. Refused: its output shape depends on the data."""

from whet.ops._refused import refuse

refuse(
    "NonMaxSuppression",
    "its output size depends on the data, but an engine needs shapes in advance; end the model at boxes and scores, and run it outside the model",
)
