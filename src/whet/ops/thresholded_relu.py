"""ThresholdedRelu: y = x above alpha, else 0."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("ThresholdedRelu", lambda x, alpha: np.where(x > alpha, x, x.dtype.type(0)), attrs={"alpha": 1.0}, samples=[{"alpha": 0.3}])
