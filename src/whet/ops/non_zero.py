"""NonZero: indices of nonzero elements [rank, n], in row-major order."""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._data_sized import make_size_symbol, register_data_sized_op

register_data_sized_op(
    "NonZero",
    lambda layer: TensorType(I64, (max(layer.needs(0).type.rank, 1), make_size_symbol(layer))),
    lambda layer, x: np.array(np.nonzero(np.atleast_1d(x)), np.int64),
    samples=[(["f32[3,4]"], {}), (["bool[2,3,4]"], {}), ([np.array([0.0, 2.0], np.float32)], {})],
)
