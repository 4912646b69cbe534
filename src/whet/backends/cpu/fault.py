"""A word that kernels set when their data are wrong, and the native call after them that stops the run if it is set."""

from __future__ import annotations

import numpy as np

from whet.backends._base import Call
from whet.backends.cpu.machine_code import load_function
from whet.errors import BackendError

HANDLER_IR = """
define i32 @whet_take_fault(i64 %address, i64 %unused1, i32 %unused2, i64 %unused3) {
start:
  %word = inttoptr i64 %address to i64*
  %set = load i64, i64* %word
  store i64 0, i64* %word
  %status = trunc i64 %set to i32
  ret i32 %status
}
"""


class FaultCall(Call):
    """Fails with the message `failure` if the word at `address` is not 0, and sets it to 0 again."""

    operands = ()

    def __init__(self, failure: str, implementation: str) -> None:
        self.failure, self.implementation = failure, implementation
        self._word = np.zeros(1, np.int64)
        self.native = (load_function(HANDLER_IR, "whet_take_fault"), self.address, 0, 0, 0)

    @property
    def address(self) -> int:
        return self._word.ctypes.data

    def run(self) -> None:
        if self._word[0]:
            self._word[0] = 0
            raise BackendError(self.failure)
