"""Moving data: reorder (layout and type), concatenation, and packing of constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from whet.backends.cpu import threads
from whet.tactics.cpu.onednn._api.attributes import Attributes
from whet.tactics.cpu.onednn._api.library import load_library
from whet.tactics.cpu.onednn._api.memory import MemoryDesc
from whet.tactics.cpu.onednn._api.primitive import NO_ATTRIBUTES, Descriptor, build, run


def reorder(src: MemoryDesc, dst: MemoryDesc, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """dst = src in another layout or type; the shapes are equal. Scales of src and dst make it a (de)quantization."""
    lib = load_library()
    with attributes.native() as attr:
        handle = lib.make("reorder_primitive_desc_create", src.handle, lib.engine, dst.handle, lib.engine, attr)
    text = f"reorder({src}, {dst}) {attributes} threads={threads.get_threads()}"
    return Descriptor(handle, ("src", "dst", *attributes.operands()), attributes.vectors(), text)


def concat(sources: Sequence[MemoryDesc], dst: MemoryDesc, axis: int, attributes: Attributes = NO_ATTRIBUTES) -> Descriptor:
    """dst = the sources one after the other along `axis`; operands `multi0`, `multi1`, ..."""
    operands = (*(f"multi{i}" for i in range(len(sources))), "dst")
    return build("concat", operands, attributes, dst, len(sources), axis, list(sources))


def pack(array: np.ndarray, layout: MemoryDesc, wanted: MemoryDesc) -> np.ndarray:
    """The bytes (uint8, 64-byte aligned) of a constant in `layout`, converted to the layout and type `wanted`."""
    return run(reorder(layout, wanted), src=array)
