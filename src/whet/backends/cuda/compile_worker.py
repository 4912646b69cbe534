"""A process that compiles for another one: requests come in on stdin, machine code or the compiler's words go out on stdout.

A request is a length (4 bytes, big-endian) and JSON: source, name, architecture, flags. An answer is a byte (0: machine code, 1: an error's text),
a length and what it says. The process ends with its stdin.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import BinaryIO

from whet.backends.cuda.compile import compile_here
from whet.errors import BackendError

REQUEST, ANSWER = struct.Struct(">I"), struct.Struct(">BI")


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until there are no more requests."""
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        source, name, arch, flags = json.loads(requests.read(REQUEST.unpack(head)[0]))
        try:
            failed, said = 0, compile_here(source, name, arch, tuple(flags))
        except BackendError as error:
            failed, said = 1, str(error).encode()
        answers.write(ANSWER.pack(failed, len(said)) + said)
        answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asked decides when to end
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    serve(sys.stdin.buffer, own)
