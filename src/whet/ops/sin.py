"""Sin: elementwise, radians."""

import numpy as np

from whet.ops._unary import unary

unary("Sin", np.sin)
