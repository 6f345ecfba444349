"""Dims as types, solved by unification.

A dim is a leaf of some size, a row-major product of dims (heads x head size) or a concatenation of dims (q, k, v). What
the traced operators do with tensors refines leaves into products and sums and makes dims of different tensors one; what
is left at the end, the leaves, are the factors that a plan can cut.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from math import gcd, prod

from tensor_parallel.layout import RUNTIME, DimLayout, Part, Segment


class Blocked(Exception):
    """Two dims do not match as types: the operator mixes their units, so none of their leaves may be cut there."""


class Dim:
    """A node: a leaf until something binds it. Compare nodes after `find`."""

    __slots__ = ("kind", "link", "parts", "size")

    def __init__(self, size: int, kind: str = "leaf", parts: tuple[Dim, ...] = ()) -> None:
        self.size = size
        self.kind = kind
        self.parts = parts
        self.link: Dim | None = None

    def __repr__(self) -> str:
        node = find(self)
        if node.kind == "leaf":
            return str(node.size)
        return ("x" if node.kind == "prod" else "+").join(f"({p})" for p in node.parts)


def find(dim: Dim) -> Dim:
    """The node that a dim has become. Links are left alone, so that joining two leaves on trial can be undone."""
    while dim.link is not None:
        dim = dim.link
    return dim


def shorten(dim: Dim) -> Dim:
    """`find`, with every link on the way, and below, made a direct one."""
    node = find(dim)
    while dim is not node:
        dim.link, dim = node, dim.link
    for part in node.parts:
        shorten(part)
    return node


def leaf(size: int) -> Dim:
    return Dim(size)


def _flat(parts: Iterable[Dim], kind: str) -> list[Dim]:
    flat: list[Dim] = []
    for part in parts:
        node = find(part)
        if node.kind == kind:
            flat.extend(_flat(node.parts, kind))
        elif node.size != (1 if kind == "prod" else 0):
            flat.append(node)
    return flat


def product(parts: Iterable[Dim]) -> Dim:
    """The row-major product; parts of size 1 vanish."""
    flat = _flat(parts, "prod")
    if len(flat) == 1:
        return flat[0]
    return Dim(prod(p.size for p in flat), "prod", tuple(flat)) if flat else leaf(1)


def concatenation(parts: Iterable[Dim]) -> Dim:
    """The concatenation; parts of size 0 vanish."""
    flat = _flat(parts, "sum")
    if len(flat) == 1:
        return flat[0]
    return Dim(sum(p.size for p in flat), "sum", tuple(flat)) if flat else leaf(0)


def leaves(dim: Dim) -> Iterator[Dim]:
    """The leaves of a dim, in order, with repetition."""
    node = find(dim)
    if node.kind == "leaf":
        yield node
    else:
        for part in node.parts:
            yield from leaves(part)


def _bind(dim: Dim, to: Dim) -> None:
    to = find(to)
    if to is dim:
        return
    if any(node is dim for node in leaves(to)):
        raise Blocked(f"{dim} occurs in {to}")
    dim.link = to


def unify(a: Dim, b: Dim) -> Dim:
    """Make two dims one.

    Raises:
        Blocked: where their structures do not fit. What was refined until then stays: finer leaves are never wrong.
    """
    a, b = shorten(a), shorten(b)
    if a is b:
        return a
    if a.size != b.size:
        raise Blocked(f"sizes {a.size} and {b.size}")
    if a.kind == "leaf":
        _bind(a, b)
    elif b.kind == "leaf":
        _bind(b, a)
    elif a.kind == b.kind == "prod":
        _unify_products(list(a.parts), list(b.parts))
    elif a.kind == b.kind == "sum":
        _unify_sums(list(a.parts), list(b.parts))
    elif a.kind == "prod":
        _distribute(a, b)
    else:
        _distribute(b, a)
    return find(a)


def _unify_products(xs: list[Dim], ys: list[Dim]) -> None:
    while xs and ys:
        xs, ys = _flat(xs, "prod"), _flat(ys, "prod")
        if not xs or not ys:
            break
        if xs[0].size == ys[0].size:
            unify(xs.pop(0), ys.pop(0))
        elif xs[0].size > ys[0].size:
            xs[:1] = split_product(xs[0], ys[0].size)
        else:
            ys[:1] = split_product(ys[0], xs[0].size)
    if _flat(xs, "prod") or _flat(ys, "prod"):
        raise Blocked("products of different sizes")


def split_product(dim: Dim, leading: int) -> list[Dim]:
    """The dim as [a dim of size `leading`, the rest]."""
    dim = find(dim)
    if leading < 1 or dim.size % leading:
        raise Blocked(f"{dim.size} is no multiple of {leading}")
    trailing = dim.size // leading
    if leading == 1 or trailing == 1:
        return [dim]
    if dim.kind == "leaf":
        first, rest = leaf(leading), leaf(trailing)
        dim.link = product([first, rest])
        return [first, rest]
    if dim.kind == "prod":
        parts = list(dim.parts)
        head: list[Dim] = []
        while parts and prod(p.size for p in head) < leading:
            left = leading // prod(p.size for p in head)
            part = find(parts.pop(0))
            if left % part.size == 0:
                head.append(part)
            else:
                pieces = split_product(part, gcd(left, part.size) if part.size % left else left)
                head.append(pieces[0])
                parts[:0] = pieces[1:]
        if prod(p.size for p in head) != leading:
            raise Blocked(f"{dim} has no leading factor {leading}")
        return [product(head), product(parts)]
    tail = leaf(trailing)
    heads = []
    for part in dim.parts:
        if find(part).size % trailing:
            raise Blocked(f"{dim} has no trailing factor {trailing}")
        head_ = leaf(find(part).size // trailing)
        unify(part, product([head_, tail]))
        heads.append(head_)
    return [concatenation(heads), tail]


def _distribute(prod_dim: Dim, sum_dim: Dim) -> None:
    """PROD[.., d] against SUM[a, b]: the trailing factor common to all segments stands in each of them."""
    common = 0
    for part in sum_dim.parts:
        common = gcd(common, find(part).size)
    parts = _flat(prod_dim.parts, "prod")
    tail: list[Dim] = []
    while parts and common % prod(p.size for p in tail) == 0:
        room = common // prod(p.size for p in tail)
        last = parts[-1]
        if room % last.size == 0:
            tail.insert(0, parts.pop())
            continue
        shared = gcd(room, last.size)
        if shared > 1:
            lead, behind = split_product(last, last.size // shared)
            parts[-1:] = [lead]
            tail.insert(0, behind)
        break
    if not tail or not parts:
        raise Blocked(f"{prod_dim} against {sum_dim}")
    size = prod(p.size for p in tail)
    heads = []
    for part in sum_dim.parts:
        head = leaf(find(part).size // size)
        unify(part, product([head, *tail]))
        heads.append(head)
    unify(product(parts), concatenation(heads))


def _unify_sums(xs: list[Dim], ys: list[Dim]) -> None:
    while xs and ys:
        xs, ys = _flat(xs, "sum"), _flat(ys, "sum")
        if not xs or not ys:
            break
        if xs[0].size == ys[0].size:
            unify(xs.pop(0), ys.pop(0))
        elif xs[0].size > ys[0].size:
            xs[:1] = cut_sum(xs[0], ys[0].size)
        else:
            ys[:1] = cut_sum(ys[0], xs[0].size)
    if _flat(xs, "sum") or _flat(ys, "sum"):
        raise Blocked("concatenations of different sizes")


def cut_sum(dim: Dim, at: int) -> list[Dim]:
    """The dim as [its first `at` units, the rest]."""
    dim = find(dim)
    if not 0 <= at <= dim.size:
        raise Blocked(f"{dim.size} cannot be cut at {at}")
    if at in (0, dim.size):
        return [leaf(0), dim] if at == 0 else [dim, leaf(0)]
    if dim.kind == "leaf":
        first, rest = leaf(at), leaf(dim.size - at)
        dim.link = concatenation([first, rest])
        return [first, rest]
    if dim.kind == "prod":
        parts = _flat(dim.parts, "prod")
        trailing = 1
        index = len(parts)
        while index > 1 and at % (trailing * parts[index - 1].size) == 0:
            index -= 1
            trailing *= parts[index].size
        shared = gcd(at // trailing, parts[index - 1].size)
        if index > 1 and shared > 1:
            parts[index - 1 : index] = split_product(parts[index - 1], parts[index - 1].size // shared)
            trailing *= shared
        else:
            index -= 1
            index = max(index, 0)
            index += 1
        if trailing == 1 or index < 1:
            raise Blocked(f"{dim} cannot be cut at {at}")
        lead, tail = product(parts[:index]), parts[index:]
        first, rest = cut_sum(lead, at // trailing)
        return [product([first, *tail]), product([rest, *tail])]
    head: list[Dim] = []
    tail_parts = list(dim.parts)
    left = at
    while left:
        part = find(tail_parts.pop(0))
        if part.size <= left:
            head.append(part)
            left -= part.size
        else:
            first, rest = cut_sum(part, left)
            head.append(first)
            tail_parts.insert(0, rest)
            left = 0
    return [concatenation(head), concatenation(tail_parts)]


def reshape(dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
    """The dims of a row-major reshape to `sizes` (no -1).

    Raises:
        Blocked: where a size cuts through the units of a dim.
    """
    rest = _flat(dims, "prod")
    result = []
    for size in sizes:
        head: list[Dim] = []
        while prod(p.size for p in head) < size:
            left = size // prod(p.size for p in head)
            if not rest or size % prod(p.size for p in head):
                raise Blocked("sizes do not fit")
            part = find(rest.pop(0))
            if part.kind == "prod":
                rest[:0] = _flat(part.parts, "prod")
            elif left % part.size == 0:
                head.append(part)
            elif part.size % left == 0:
                first, *others = split_product(part, left)
                head.append(first)
                rest[:0] = others
            else:
                shared = gcd(left, part.size)
                if shared == 1:
                    raise Blocked(f"{part} does not fit size {size}")
                first, *others = split_product(part, shared)
                head.append(first)
                rest[:0] = others
        result.append(product(head) if size != 1 else leaf(1))
    if _flat(rest, "prod"):
        raise Blocked("sizes do not fit")
    return result


Cut = dict[Dim, str]
"""Names of the leaves that are cut."""


def normal_form(dim: Dim, cut: Cut, known: Container[Dim] | None = None) -> DimLayout:
    """The dim as segments of parts, with the leaves of `cut` as factors and all else merged.

    known: leaves whose size is the model's own; the others become RUNTIME where they stand beside a factor. None: all.
    Raises:
        Blocked: where a factor is cut inside a concatenation that a factor or a run-time size repeats.
    """
    segments = _segments(find(dim), cut, known)
    merged: list[list[Part]] = []
    for parts in segments:
        row = _merged(parts)
        plain = all(p.factor is None for p in row)
        if merged and plain and all(p.factor is None for p in merged[-1]) and row[0].size >= 0 <= merged[-1][0].size:
            merged[-1] = [Part(merged[-1][0].size + row[0].size)]
        else:
            merged.append(row)
    return DimLayout(tuple(Segment(tuple(row)) for row in merged))


def _merged(parts: Sequence[Part]) -> list[Part]:
    row: list[Part] = []
    for part in parts:
        if part.factor is None and row and row[-1].factor is None:
            both = (row[-1].size, part.size)
            row[-1] = Part(RUNTIME if RUNTIME in both else both[0] * both[1])
        else:
            row.append(part)
    return row or [Part(1)]


def _segments(dim: Dim, cut: Cut, known: Container[Dim] | None) -> list[list[Part]]:
    if dim.kind == "leaf":
        open_ = known is not None and dim not in known and dim not in cut
        return [[Part(RUNTIME if open_ else dim.size, cut.get(dim))]]
    if dim.kind == "sum":
        return [row for part in dim.parts for row in _segments(find(part), cut, known)]
    if not any(node in cut for node in leaves(dim)):
        open_ = known is not None and any(node not in known for node in leaves(dim))
        return [[Part(RUNTIME if open_ else dim.size)]]
    rows: list[list[Part]] = [[]]
    for part in dim.parts:
        node = find(part)
        inner = _segments(node, cut, known)
        if not any(n in cut for n in leaves(node)):
            inner = [[Part(RUNTIME if any(p.size == RUNTIME for r in inner for p in r) else node.size)]]
        if len(inner) == 1:
            rows = [row + inner[0] for row in rows]
        else:
            rows = [piece + tail for row in rows for piece in _repeat(row) for tail in inner]
    return rows


def _repeat(row: list[Part]) -> list[list[Part]]:
    """A prefix in front of a concatenation that is cut inside: written out, once for each of its indices."""
    if any(p.factor is not None or p.size == RUNTIME for p in row):
        raise Blocked("a factor inside a concatenation that another factor or a run-time size repeats")
    return [[] for _ in range(prod(p.size for p in row))]
