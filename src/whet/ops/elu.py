"""Elu: y = x, or alpha * (e^x - 1) below 0."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Elu", lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))), attrs={"alpha": 1.0}, samples=[{"alpha": 2.0}])
