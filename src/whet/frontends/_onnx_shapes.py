"""Types of a model's inputs: dim_params and unnamed dims become symbols; user-given shapes set or rename them.

Conventions for dims without a name: axis 0 is the batch `N`, shared by all inputs; axes 2 and 3 of a rank-4 input are `H` and
`W`; any other is named after its input and axis (`mask_1`).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import onnx

from whet.errors import FrontendError, NetworkError, UnsupportedError
from whet.frontends._onnx_tensors import get_onnx_dtype
from whet.network import MAX_ELEMENTS, STRING, Dim, Expr, TensorType, find_symbols, make_symbol, parse_dim, substitute
from whet.registry import suggest_name

UserShapes = Mapping[str, Sequence[int | str | None]]


class SymbolTable:
    """A bijection between dim_param texts and symbols."""

    def __init__(self, plain: Iterable[str] = ()) -> None:
        """`plain` are the texts used alone: only these names may occur in an expression such as `2*seq`."""
        self._plain = {p for p in plain if _is_name(p)}
        self._by_text: dict[str, Dim] = {p: make_symbol(p) for p in self._plain}
        self._taken: set[str] = set(self._plain)

    def of_text(self, text: str) -> Dim:
        """The dim of a dim_param: a symbol, an expression over symbols, or a sanitized name."""
        if text not in self._by_text:
            self._by_text[text] = self._make(text)
        return self._by_text[text]

    def fresh(self, wish: str) -> Dim:
        """A new symbol named `wish` or similar."""
        base = re.sub(r"[^0-9a-zA-Z_]", "_", wish) or "d"
        base = base if _is_name(base) else f"d_{base}"
        name, i = base, 1
        while name in self._taken:
            i += 1
            name = f"{base}_{i}"
        self._taken.add(name)
        return make_symbol(name)

    def _make(self, text: str) -> Dim:
        if not _is_name(text) and len(text) <= 100:
            try:
                d = parse_dim(text)
            except NetworkError:
                return self.fresh(text)
            if isinstance(d, Expr) and find_symbols(d) <= self._plain:
                return d
        return self.fresh(text)


def _is_name(text: str) -> bool:
    """True if `text` is a valid symbol: an identifier that is not a Python keyword, as the text form is parsed as Python."""
    return text.isidentifier() and text.isascii() and not keyword.iskeyword(text) and text not in ("min", "max")


def find_plain_names(infos: Iterable[onnx.ValueInfoProto]) -> set[str]:
    """dim_params of declared tensors."""
    return {d.dim_param for i in infos if i.type.HasField("tensor_type") for d in i.type.tensor_type.shape.dim if d.dim_param}


def read_value_type(info: onnx.ValueInfoProto, table: SymbolTable, subject: str, user: Sequence[int | str | None] | None = None) -> TensorType:
    """The type of a declared value. Raises FrontendError or UnsupportedError naming `subject`."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        named = (kind or "no type").removesuffix("_type")
        article = "an" if named == "optional" else "a"
        raise UnsupportedError(f"{subject} is {article} {named}, not a tensor; whet supports tensors only. Replace the {named} before export.")
    tensor = info.type.tensor_type
    dtype = get_onnx_dtype(tensor.elem_type, subject)
    if dtype == STRING:
        raise UnsupportedError(f"{subject} holds strings, which engines do not support. Encode text before the network.")
    if not tensor.HasField("shape"):
        if user is None:
            raise FrontendError(f"{subject} has no shape in the model, not even a rank. Give it: shapes={{{info.name!r}: ('N', 3, 224, 224)}}.")
        return TensorType(dtype, tuple(table.fresh(f"{info.name}_{i}") for i in range(len(user))))
    dims: list[Dim] = []
    rank = len(tensor.shape.dim)
    for axis, d in enumerate(tensor.shape.dim):
        if d.dim_param:
            dims.append(table.of_text(d.dim_param))
        elif d.HasField("dim_value") and d.dim_value >= 0:
            dims.append(d.dim_value)
        elif axis == 0:
            dims.append(table.of_text("N"))
        elif rank == 4 and axis >= 2:
            dims.append(table.of_text("HW"[axis - 2]))
        else:
            dims.append(table.fresh(f"{info.name}_{axis}"))
    if prod(d for d in dims if isinstance(d, int)) > MAX_ELEMENTS:
        raise FrontendError(f"{subject} has the shape [{', '.join(map(str, dims))}], which is too large. The model is damaged: export it again.")
    return TensorType(dtype, tuple(dims))


def apply_user_shapes(types: dict[str, TensorType], user: UserShapes | None, table: SymbolTable) -> dict[str, TensorType]:
    """Applies user-given shapes to `types`: an int sets a symbol everywhere, a name renames it, None keeps it.

    Raises FrontendError for an unknown input, a wrong rank, a size in conflict with the model, or two values for one symbol.
    """
    env: dict[str, Dim] = {}
    for name, shape in (user or {}).items():
        if name not in types:
            raise FrontendError(
                f"there is no input {name!r} to give a shape to.{suggest_name(name, types)} The inputs are {', '.join(types) or 'none'}."
            )
        have = types[name].shape
        if len(shape) != len(have):
            raise FrontendError(f"input {name!r} is of rank {len(have)} ({types[name]}); the shape given, {tuple(shape)}, is of rank {len(shape)}.")
        for axis, (want, dim) in enumerate(zip(shape, have, strict=True)):
            where = f"input {name!r}, axis {axis}"
            if want is None or want == -1 or want == dim:
                continue
            if isinstance(dim, int):
                raise FrontendError(
                    f"{where}: the model fixes {dim}, {want!r} was given. Export the model with this axis dynamic, or leave it as it is."
                )
            key = str(dim)
            if not key.isidentifier():
                continue  # an expression follows from its symbols and is checked below
            if not isinstance(want, int | str) or (isinstance(want, int) and want < 0):
                raise FrontendError(f"{where}: a size is a number from 0 up, a name, or None, not {want!r}.")
            try:
                value = want if isinstance(want, int) else make_symbol(want)
            except NetworkError as e:
                raise FrontendError(f"{where}: {e}") from e
            if env.setdefault(key, value) != value:
                raise FrontendError(f"{where}: {key} is given as {value} here and as {env[key]} elsewhere; one name has one size.")
    made = {n: t.with_shape(substitute(d, env) for d in t.shape) for n, t in types.items()}
    for name, shape in (user or {}).items():
        for axis, (want, dim) in enumerate(zip(shape, made[name].shape, strict=True)):
            if isinstance(want, int) and want >= 0 and isinstance(dim, int) and want != dim:
                raise FrontendError(f"input {name!r}, axis {axis}: {types[name].shape[axis]} is {dim} with the sizes given, not {want}.")
    return made
