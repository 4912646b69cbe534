"""Dimensions: integers, or integer expressions over symbols such as N, H and W.

An expression is a polynomial with integer coefficients over atoms; an atom is a symbol, or a floor division, minimum or
maximum of expressions. Polynomials are kept in one canonical form, so `N*3*4 == 12*N` and equal expressions hash alike.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from whet.errors import NetworkError

Atom = tuple  # ("sym", name) | ("floordiv", Expr, int | Expr) | ("min" | "max", Expr, Expr)
Monomial = tuple[tuple[Atom, int], ...]


_MOST_TERMS = 4096  # per product: real dimensions have a handful, a hostile text could have 2^k


class Expr:
    """An integer expression over symbols; immutable, hashable, with the arithmetic operators."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms: tuple[tuple[Monomial, int], ...] = tuple(sorted(((m, c) for m, c in terms.items() if c), key=_make_term_key))
        self._hash = hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.terms == other.terms

    def __add__(self, other: Dim) -> Dim:
        return _add(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _add(self, other, -1)

    def __rsub__(self, other: Dim) -> Dim:
        return _add(to_expr(other), self, -1)

    def __neg__(self) -> Dim:
        return self * -1

    def __mul__(self, other: Dim) -> Dim:
        if not isinstance(other, Expr):
            return lower(Expr({m: c * int(other) for m, c in self.terms}))
        out: dict[Monomial, int] = {}
        if len(self.terms) * len(other.terms) > _MOST_TERMS:
            raise NetworkError(f"a dimension of more than {_MOST_TERMS} terms is refused")
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = _join(m1, m2)
                out[m] = out.get(m, 0) + c1 * c2
        return lower(Expr(out))

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return self - floordiv(self, other) * other

    def __str__(self) -> str:
        parts = []
        for m, c in reversed(self.terms):
            factors = [_format_atom(a) for a, power in m for _ in range(power)]
            if not factors or abs(c) != 1:
                factors.insert(0, str(abs(c)))
            parts.append(("-" if c < 0 else "+", "*".join(factors)))
        if not parts:
            return "0"
        head = parts[0][1] if parts[0][0] == "+" else "-" + parts[0][1]
        return head + "".join(sign + text for sign, text in parts[1:])

    __repr__ = __str__


Dim = int | Expr
Shape = tuple[Dim, ...]


def make_symbol(name: str) -> Expr:
    """The symbol `name` as an expression."""
    if not name.isidentifier():
        raise NetworkError(f"{name!r} is no name for a dimension: use letters, digits and '_', not starting with a digit")
    return Expr({((("sym", name), 1),): 1})


def to_expr(d: Dim) -> Expr:
    """A dim as an expression; a number is a constant one."""
    return d if isinstance(d, Expr) else Expr({(): int(d)})


def lower(e: Expr) -> Dim:
    """`e` as an int if it is constant, else `e`."""
    if not e.terms:
        return 0
    if len(e.terms) == 1 and e.terms[0][0] == ():
        return e.terms[0][1]
    return e


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, simplified: multiples of b are moved out of the division ((6*N + 1) // 2 = 3*N), equal expressions give 1."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise NetworkError(f"division of dimension {a} by zero")
        return a // b
    if a == b:
        return 1
    ea, eb = to_expr(a), to_expr(b)
    if len(eb.terms) == 1:
        (mb, cb) = eb.terms[0]
        whole: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for m, c in ea.terms:
            left = _divide(m, mb)
            exact = left is not None and (c % cb == 0 or m == ())
            q, r = divmod(c, cb) if exact else (0, c)
            if q and left is not None:
                whole[left] = whole.get(left, 0) + q
            if r:
                rest[m] = r
        if not rest:
            return lower(Expr(whole))
        remainder = lower(Expr(rest))
        if isinstance(remainder, int) and isinstance(b, int):
            return lower(Expr(whole)) + remainder // b
        return lower(Expr(whole)) + Expr({((("floordiv", Expr(rest), eb), 1),): 1})
    return Expr({((("floordiv", ea, eb), 1),): 1})


def ceildiv(a: Dim, b: Dim) -> Dim:
    """a / b, rounded up."""
    return -floordiv(-a, b)


def minimum(a: Dim, b: Dim) -> Dim:
    """The smaller of two dims, symbolic if undecided."""
    return _make_min_or_max("min", a, b)


def maximum(a: Dim, b: Dim) -> Dim:
    """The larger of two dims, symbolic if undecided."""
    return _make_min_or_max("max", a, b)


def product(dims: Iterable[Dim]) -> Dim:
    """The product of all dims; 1 for none."""
    out: Dim = 1
    for d in dims:
        out = out * d
    return out


def find_symbols(d: Dim) -> set[str]:
    """Names of the symbols in `d`."""
    if isinstance(d, int):
        return set()
    names: set[str] = set()
    for m, _ in d.terms:
        for atom, _ in m:
            if atom[0] == "sym":
                names.add(atom[1])
            else:
                names |= find_symbols(atom[1]) | find_symbols(atom[2])
    return names


def evaluate(d: Dim, env: Mapping[str, int]) -> int:
    """The value of `d` with symbols from `env`. Raises NetworkError for a symbol without value."""
    got = substitute(d, env)
    if not isinstance(got, int):
        missing = sorted(find_symbols(got))
        raise NetworkError(f"dimension {d} needs a value for {', '.join(missing)}")
    return got


def substitute(d: Dim, env: Mapping[str, Dim]) -> Dim:
    """`d` with the symbols named in `env` replaced."""
    if isinstance(d, int):
        return d
    total: Dim = 0
    for m, c in d.terms:
        term: Dim = c
        for atom, power in m:
            value = _substitute_atom(atom, env)
            for _ in range(power):
                term = term * value
        total = total + term
    return total


LONGEST_DIM = 2000  # characters of the text of a dimension


def parse_dim(text: str) -> Dim:
    """The dimension written as `text`: integers, names, + - * //, min(a,b), max(a,b). Raises NetworkError."""
    if len(text) > LONGEST_DIM:
        raise NetworkError(f"a dimension of {len(text)} characters is refused")
    if text.isascii() and text.isdecimal() and text[0] != "0":  # most are: a tenth of the time of the syntax tree
        return int(text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise NetworkError(f"{text[:80]!r} is no dimension") from e
    return _from_ast(tree, text)


def _from_ast(t: ast.AST, text: str) -> Dim:
    match t:
        case ast.Constant(value=int(v)) if not isinstance(v, bool):
            return v
        case ast.Name(id=name):
            return make_symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return -_from_ast(a, text)
        case ast.BinOp(left=a, op=op, right=b):
            x, y = _from_ast(a, text), _from_ast(b, text)
            match op:
                case ast.Add():
                    return x + y
                case ast.Sub():
                    return x - y
                case ast.Mult():
                    return x * y
                case ast.FloorDiv():
                    return floordiv(x, y)
        case ast.Call(func=ast.Name(id="min" | "max" as f), args=[a, b], keywords=[]):
            return _make_min_or_max(f, _from_ast(a, text), _from_ast(b, text))
    raise NetworkError(f"{text[:80]!r} is no dimension: only integers, names, + - * //, min and max are allowed")


def _make_min_or_max(kind: str, a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if kind == "min" else max(a, b)
    if a == b:
        return a
    ea, eb = sorted((to_expr(a), to_expr(b)), key=str)
    return Expr({(((kind, ea, eb), 1),): 1})


def _substitute_atom(atom: Atom, env: Mapping[str, Dim]) -> Dim:
    if atom[0] == "sym":
        return env.get(atom[1], Expr({((atom, 1),): 1}))
    a, b = substitute(lower(atom[1]), env), substitute(lower(atom[2]), env)
    return floordiv(a, b) if atom[0] == "floordiv" else _make_min_or_max(atom[0], a, b)


def _add(a: Expr, b: Dim, sign: int) -> Dim:
    out = dict(a.terms)
    for m, c in to_expr(b).terms:
        out[m] = out.get(m, 0) + sign * c
    return lower(Expr(out))


def _join(a: Monomial, b: Monomial) -> Monomial:
    powers: dict[Atom, int] = dict(a)
    for atom, p in b:
        powers[atom] = powers.get(atom, 0) + p
    return tuple(sorted(powers.items(), key=lambda kv: _format_atom(kv[0])))


def _divide(m: Monomial, by: Monomial) -> Monomial | None:
    powers = dict(m)
    for atom, p in by:
        if powers.get(atom, 0) < p:
            return None
        powers[atom] -= p
    return tuple((a, p) for a, p in sorted(powers.items(), key=lambda kv: _format_atom(kv[0])) if p)


def _format_atom(a: Atom) -> str:
    if a[0] == "sym":
        return a[1]
    if a[0] == "floordiv":
        return f"(({lower(a[1])})//({lower(a[2])}))"
    return f"{a[0]}({lower(a[1])},{lower(a[2])})"


def _make_term_key(term: tuple[Monomial, int]):
    m, _ = term
    return (sum(p for _, p in m), [(_format_atom(a), p) for a, p in m])
