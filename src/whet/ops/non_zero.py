"""NonZero: indices of nonzero elements [rank, n], in row-major order."""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._data_sized import data_size, op_with_data_size

op_with_data_size(
    "NonZero",
    lambda layer: TensorType(I64, (max(layer.needs(0).type.rank, 1), data_size(layer))),
    lambda layer, x: np.array(np.nonzero(np.atleast_1d(x)), np.int64),
    samples=[(["f32[3,4]"], {}), (["bool[2,3,4]"], {}), ([np.array([0.0, 2.0], np.float32)], {})],
)
