"""LeakyRelu: y = x, or alpha * x below 0."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("LeakyRelu", lambda x, alpha: np.where(x >= 0, x, x * alpha), attrs={"alpha": 0.01}, samples=[{"alpha": 0.1}])
