"""CUDA text of torch's operators on single numbers and short vectors: cuda_src/flex/mods.cuh has what it
calls.

An operator is a function of a `Writer` and of what the traced call had as arguments: `Value`, `View`, numbers
and lists of them. `meta` is the fake result of the call, which tells its dtype and shape.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

MAX_ELEMENTS = 16
"""The most elements of a vector that a function may have in between."""
_C_TYPES = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "i64",
    **dict.fromkeys((torch.bfloat16, torch.float16, torch.float32, torch.float64), "float"),
}
"""All floating-point numbers are float in between."""
_NAMED = re.compile(r"\bv(\d+)\b")
"""Names that a `Writer` gives."""


class Refused(Exception):
    """A function does what kernels cannot; the message goes on from "the function's name: "."""


class Value(NamedTuple):
    """Numbers in between: C++ expressions without side effects, in the order of a contiguous array."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    items: tuple[str, ...]

    def at(self, place: Sequence[int]) -> str:
        """The number at these indices."""
        position = 0
        for extent, index in zip(self.shape, place, strict=True):
            position = position * extent + index
        return self.items[position]


class View(NamedTuple):
    """Part of a captured array, not read yet: of each of its dimensions an index, or what a slice leaves.

    The dimensions of the view are those with a range, in their order.
    """

    capture: int
    dtype: torch.dtype
    dims: tuple[str | range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(dim) for dim in self.dims if isinstance(dim, range))

    def with_dim(self, dim: int, change: Callable[[range], str | range]) -> View:
        """The view with another of its own dimensions."""
        places = [place for place, one in enumerate(self.dims) if isinstance(one, range)]
        place = places[dim % len(places)]
        whole = self.dims[place]
        assert isinstance(whole, range)
        return self._replace(dims=(*self.dims[:place], change(whole), *self.dims[place + 1 :]))


def elements(view: View) -> list[tuple[str, ...]]:
    """The indices of each element, in the order of a contiguous array."""
    choices = [dim if isinstance(dim, range) else (dim,) for dim in view.dims]
    return [tuple(map(str, indices)) for indices in itertools.product(*choices)]


class Writer:
    """Collects the statements of a function, and the numbers that it closes over."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: list[Any] = []
        """Python numbers, and 0-d tensors of the CPU; the text has ``mod.n<i>`` for them."""
        self.of_gradients = False
        """Whether operators belong to gradients: a 0 stands in the text then, as no number of a user's."""
        self._names: dict[tuple[str, str], str] = {}

    def let(self, c_type: str, text: str) -> str:
        """Name the value of an expression; one that has been named keeps its name."""
        name = self._names.setdefault((c_type, text), f"v{len(self.lines)}")
        if name == f"v{len(self.lines)}":
            self.lines.append(f"const {c_type} {name} = {text};")
        return name

    def needed(self, *texts: str) -> list[str]:
        """The statements that expressions need, in their order."""
        numbers: set[int] = set()
        open_ends = list(texts)
        while open_ends:
            new = {int(number) for number in _NAMED.findall(open_ends.pop())} - numbers
            numbers |= new
            open_ends += [self.lines[number].partition(" = ")[2] for number in new]
        return [self.lines[number] for number in sorted(numbers)]

    def reads(self, *texts: str) -> set[str]:
        """The words of expressions and of what they need: arguments of the function are among them."""
        return set(re.findall(r"\w+", " ".join([*self.needed(*texts), *texts])))

    def number(self, number: Any) -> str:
        """A Python number or 0-d CPU tensor as a parameter of the kernel."""
        self.numbers.append(number)
        return f"mod.n{len(self.numbers) - 1}"

    def value(self, x: Any) -> Value:
        """A number, or a view that is read now, as a value."""
        if isinstance(x, Value):
            return x
        if isinstance(x, View):
            return self._read(x)
        if isinstance(x, bool):
            return Value(torch.bool, (), ("true" if x else "false",))
        if self.of_gradients and isinstance(x, (int, float)) and x == 0:
            return Value(torch.float32 if isinstance(x, float) else torch.int64, (), ("0",))
        if isinstance(x, int):
            return Value(torch.int64, (), (self.number(x),))
        if isinstance(x, float):
            if math.isinf(x):
                return Value(torch.float32, (), ("kInfinity" if x > 0 else "-kInfinity",))
            return Value(torch.float32, (), ("kNaN" if math.isnan(x) else self.number(x),))
        raise Refused(f"an argument of type {type(x).__name__}")

    def _read(self, view: View) -> Value:
        count = math.prod(view.shape)
        if count > MAX_ELEMENTS:
            raise Refused(
                f"reads {count} elements of a captured tensor at once (shape {list(view.shape)}); at most "
                f"{MAX_ELEMENTS} can be in use, index it by b, h, q_idx or kv_idx"
            )
        items = [
            self.let(_C_TYPES[view.dtype], f"mod.t{view.capture}({', '.join(indices)})")
            for indices in elements(view)
        ]
        return Value(view.dtype, view.shape, tuple(items))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The same numbers in another dtype."""
        if _C_TYPES[dtype] == _C_TYPES[value.dtype]:
            return value._replace(dtype=dtype)
        if dtype == torch.bool:
            items = tuple(f"({item} != 0)" for item in value.items)
        else:
            items = tuple(f"static_cast<{_C_TYPES[dtype]}>({item})" for item in value.items)
        return Value(dtype, value.shape, items)

    def broadcast(self, value: Value, shape: tuple[int, ...]) -> Value:
        """The same numbers, repeated to fill a shape."""
        if value.shape == shape:
            return value
        if math.prod(shape) > MAX_ELEMENTS:
            raise Refused(
                f"has a vector of shape {list(shape)} in between, more than {MAX_ELEMENTS} elements"
            )
        own = (1,) * (len(shape) - len(value.shape)) + value.shape
        repeated = [extent == 1 for extent in own]
        return _take(
            value._replace(shape=own),
            shape,
            lambda place: [0 if one else index for index, one in zip(place, repeated, strict=True)],
        )

    def elementwise(
        self,
        dtype: torch.dtype,
        arguments: Sequence[Any],
        text: Callable[..., str],
        result: torch.dtype | None = None,
    ) -> Value:
        """Apply ``text`` to the elements of arguments in a dtype; ``result``: the dtype it leaves."""
        values = self.cast_all(arguments, dtype)
        shape = torch.broadcast_shapes(*(value.shape for value in values))
        columns = zip(*(self.broadcast(value, tuple(shape)).items for value in values), strict=True)
        left = result or dtype
        items = tuple(self.let(_C_TYPES[left], text(*column)) for column in columns)
        return Value(left, tuple(shape), items)

    def arithmetic(self, dtype: torch.dtype, arguments: Sequence[Any], text: Callable[..., str]) -> Value:
        """`elementwise` as torch computes in a dtype: arguments become small integers, of which -1 is 255 as
        a uint8; they are computed as int, and results are cut down again.
        """
        return self.cast(self.elementwise(_computed(dtype), self.cast_all(arguments, dtype), text), dtype)

    def cast_all(self, arguments: Sequence[Any], dtype: torch.dtype) -> list[Value]:
        """Arguments as values of a dtype."""
        return [self.cast(self.value(x), dtype) for x in arguments]


def _places(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of all elements, in the order of a contiguous array."""
    return itertools.product(*map(range, shape))


def _take(value: Value, shape: tuple[int, ...], source: Callable[[tuple[int, ...]], Sequence[int]]) -> Value:
    """Some elements of a value; `source` says where an element of the result comes from."""
    return Value(value.dtype, shape, tuple(value.at(source(place)) for place in _places(shape)))


Operator = Callable[..., Any]
OPERATORS: dict[str, Operator] = {}
"""By the name that torch's schema has, without namespace and overload."""


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def keep(function: Operator) -> Operator:
        for name in names:
            OPERATORS[name] = function
        return function

    return keep


def _computed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a result of this dtype is computed: small integers are cut down afterwards."""
    if dtype in (torch.uint8, torch.int8, torch.int16, torch.bool):
        return torch.int32
    return dtype


def _call(name: str) -> Callable[..., str]:
    return lambda *items: f"{name}({', '.join(items)})"


def _in_result_dtype(name: str) -> Operator:
    return lambda writer, meta, *arguments: writer.arithmetic(meta.dtype, arguments, _call(name))


def _in_float(name: str) -> Operator:
    return lambda writer, meta, *arguments: writer.elementwise(torch.float32, arguments, _call(name))


def _promoted(writer: Writer, arguments: Sequence[Any]) -> torch.dtype:
    """The dtype in which torch compares."""
    dtypes = [
        torch.empty((), dtype=x.dtype, device="meta") if isinstance(x, (Value, View)) else x
        for x in arguments
    ]
    return dtypes[0].dtype if len(dtypes) == 1 else torch.result_type(*dtypes)


def _comparison(sign: str) -> Operator:
    def operator(writer: Writer, meta: Any, *arguments: Any) -> Value:
        dtype = _promoted(writer, arguments)
        values = writer.cast_all(arguments, dtype)
        return writer.elementwise(_computed(dtype), values, lambda a, b: f"{a} {sign} {b}", torch.bool)

    return operator


def _bitwise(sign: str) -> Operator:
    def operator(writer: Writer, meta: Any, a: Any, b: Any) -> Value:
        apply = writer.elementwise if meta.dtype == torch.bool else writer.arithmetic
        return apply(meta.dtype, (a, b), lambda x, y: f"{x} {sign} {y}")

    return operator


def _logical(text: Callable[..., str]) -> Operator:
    return lambda writer, meta, *arguments: writer.elementwise(torch.bool, arguments, text)


def _predicate(text: Callable[[str], str]) -> Operator:
    """A test of floating-point numbers; integers are finite."""
    return lambda writer, meta, x: writer.elementwise(torch.float32, (x,), text, torch.bool)


for _name in (
    *("mul", "neg", "abs", "floor_divide", "remainder", "fmod", "maximum", "minimum", "sign", "square"),
):
    OPERATORS[_name] = _in_result_dtype(f"torch_{_name}")
OPERATORS["sgn"] = OPERATORS["sign"]
for _name in (
    *("reciprocal", "exp", "exp2", "log", "log2", "log10", "tanh", "sigmoid", "silu", "frac"),
    *("sin", "cos", "tan", "sinh", "asinh", "acosh", "atanh", "atan2", "sqrt", "log1p", "expm1", "erfc"),
):
    OPERATORS[_name] = _in_float(f"torch_{_name}")
for _name in ("rsqrt", "asin", "acos", "atan", "cosh", "erf"):
    OPERATORS[_name] = _in_float(f"{_name}f")
for _name, _sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    OPERATORS[_name] = _comparison(_sign)
for _name, _sign in (("and", "&"), ("or", "|"), ("xor", "^")):
    OPERATORS[f"bitwise_{_name}"] = OPERATORS[f"__{_name}__"] = _bitwise(_sign)
OPERATORS["logical_and"] = _logical(lambda a, b: f"{a} && {b}")
OPERATORS["logical_or"] = _logical(lambda a, b: f"{a} || {b}")
OPERATORS["logical_xor"] = _logical(lambda a, b: f"{a} != {b}")
OPERATORS["logical_not"] = _logical(lambda a: f"!{a}")
OPERATORS["isnan"] = _predicate(lambda x: f"{x} != {x}")
OPERATORS["isinf"] = _predicate(lambda x: f"fabsf({x}) == kInfinity")
OPERATORS["isfinite"] = _predicate(lambda x: f"fabsf({x}) < kInfinity")
OPERATORS["isneginf"] = _predicate(lambda x: f"{x} == -kInfinity")
OPERATORS["isposinf"] = _predicate(lambda x: f"{x} == kInfinity")


def _rounding(name: str) -> Operator:
    def operator(writer: Writer, meta: Any, x: Any, *, decimals: int = 0) -> Value:
        value = writer.value(x)
        if decimals:
            raise Refused("round with decimals")
        if not value.dtype.is_floating_point:
            return value
        return writer.elementwise(torch.float32, (value,), _call(name))

    return operator


for _name in ("floor", "ceil", "trunc"):
    OPERATORS[_name] = _rounding(f"{_name}f")
OPERATORS["round"] = _rounding("rintf")  # to even, as torch


def _sum_of(writer: Writer, meta: Any, a: Any, b: Any, alpha: Any, name: str) -> Value:
    if alpha != 1:
        b = writer.arithmetic(meta.dtype, (b, alpha), _call("torch_mul"))
    return writer.arithmetic(meta.dtype, (a, b), _call(name))


OPERATORS["add"] = lambda writer, meta, a, b, alpha=1: _sum_of(writer, meta, a, b, alpha, "torch_add")
OPERATORS["sub"] = lambda writer, meta, a, b, alpha=1: _sum_of(writer, meta, a, b, alpha, "torch_sub")
OPERATORS["rsub"] = lambda writer, meta, a, b, alpha=1: _sum_of(writer, meta, b, a, alpha, "torch_sub")


@_operator("div", "true_divide", "divide")
def _div(writer: Writer, meta: Any, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return writer.elementwise(torch.float32, (a, b), _call("torch_div"))
    name = {"floor": "torch_floor_divide", "trunc": "torch_trunc_divide"}[rounding_mode]
    return writer.arithmetic(meta.dtype, (a, b), _call(name))


@_operator("pow")
def _pow(writer: Writer, meta: Any, a: Any, b: Any) -> Value:
    """Small powers are part of the text, since they are multiplications."""
    dtype = _computed(meta.dtype)
    if isinstance(b, int) and 1 <= b <= 4 and dtype in (torch.int32, torch.int64):
        result = base = writer.elementwise(dtype, (a,), str)
        for _ in range(b - 1):
            result = writer.elementwise(dtype, (result, base), _call("torch_mul"))
        return writer.cast(result, meta.dtype)
    if isinstance(b, (int, float)) and dtype.is_floating_point:
        if b == 1:
            return writer.cast(writer.value(a), torch.float32)
        if abs(b) in (2, 3, 4):
            base = writer.cast(writer.value(a), torch.float32)
            power = "torch_reciprocal({})" if b < 0 else "{}"
            return writer.elementwise(
                torch.float32, (base,), lambda x: power.format(" * ".join([x] * int(abs(b))))
            )
        if b in (0.5, -0.5, -1):
            name = {0.5: "torch_sqrt", -0.5: "rsqrtf", -1: "torch_reciprocal"}[b]
            return writer.elementwise(torch.float32, (a,), _call(name))
    return writer.arithmetic(meta.dtype, (a, b), _call("torch_pow"))


@_operator("bitwise_not")
def _bitwise_not(writer: Writer, meta: Any, x: Any) -> Value:
    if meta.dtype == torch.bool:
        return writer.elementwise(torch.bool, (x,), lambda item: f"!{item}")
    return writer.arithmetic(meta.dtype, (x,), lambda item: f"~{item}")


for _name, _side in (("__lshift__", "left"), ("__rshift__", "right")):
    OPERATORS[_name] = OPERATORS[f"bitwise_{_side}_shift"] = _in_result_dtype(f"torch_{_side}_shift")


@_operator("clamp", "clip", "clamp_min")
def _clamp(writer: Writer, meta: Any, x: Any, min: Any = None, max: Any = None) -> Value:
    value = writer.cast(writer.value(x), meta.dtype)
    if min is not None:
        value = writer.arithmetic(meta.dtype, (value, min), _call("torch_maximum"))
    if max is not None:
        value = writer.arithmetic(meta.dtype, (value, max), _call("torch_minimum"))
    return value


OPERATORS["clamp_max"] = lambda writer, meta, x, max: _clamp(writer, meta, x, None, max)
OPERATORS["hardtanh"] = lambda writer, meta, x, min_val=-1, max_val=1: _clamp(
    writer, meta, x, min_val, max_val
)


@_operator("relu")
def _relu(writer: Writer, meta: Any, x: Any) -> Value:
    zero = Value(_computed(meta.dtype), (), ("0",))
    return writer.arithmetic(meta.dtype, (x, zero), _call("torch_maximum"))


@_operator("gelu")
def _gelu(writer: Writer, meta: Any, x: Any, *, approximate: str = "none") -> Value:
    name = "torch_gelu_tanh" if approximate == "tanh" else "torch_gelu"
    return writer.elementwise(torch.float32, (x,), _call(name))


OPERATORS["softplus"] = lambda writer, meta, x, beta=1.0, threshold=20.0: writer.elementwise(
    torch.float32, (x, float(beta), float(threshold)), _call("torch_softplus")
)
OPERATORS["leaky_relu"] = lambda writer, meta, x, slope=0.01: writer.elementwise(
    torch.float32, (x, float(slope)), _call("torch_leaky_relu")
)
OPERATORS["elu"] = lambda writer, meta, x, alpha=1.0, scale=1.0, input_scale=1.0: writer.elementwise(
    torch.float32, (x, float(alpha), float(scale), float(input_scale)), _call("torch_elu")
)


@_operator("where")
def _where(writer: Writer, meta: Any, condition: Any, a: Any, b: Any) -> Value:
    chosen = writer.cast(writer.value(condition), torch.bool)
    first, second = (writer.cast(writer.value(x), meta.dtype) for x in (a, b))
    shape = tuple(meta.shape)
    columns = zip(*(writer.broadcast(value, shape).items for value in (chosen, first, second)), strict=True)
    c_type = _C_TYPES[meta.dtype]
    return Value(meta.dtype, shape, tuple(writer.let(c_type, f"{c} ? {x} : {y}") for c, x, y in columns))


OPERATORS["masked_fill"] = lambda writer, meta, x, mask, value: _where(writer, meta, mask, value, x)


# ---- derivatives


for _name in ("tanh_backward", "sigmoid_backward", "silu_backward", "threshold_backward"):
    OPERATORS[_name] = _in_float(f"torch_{_name}")


@_operator("gelu_backward")
def _gelu_backward(writer: Writer, meta: Any, grad: Any, x: Any, *, approximate: str = "none") -> Value:
    name = "torch_gelu_tanh_backward" if approximate == "tanh" else "torch_gelu_backward"
    return writer.elementwise(torch.float32, (grad, x), _call(name))


OPERATORS["softplus_backward"] = lambda writer, meta, grad, x, beta, threshold: writer.elementwise(
    torch.float32, (grad, x, float(beta), float(threshold)), _call("torch_softplus_backward")
)
OPERATORS["hardtanh_backward"] = lambda writer, meta, grad, x, low, high: writer.elementwise(
    torch.float32, (grad, x, float(low), float(high)), _call("torch_hardtanh_backward")
)
OPERATORS["leaky_relu_backward"] = lambda writer, meta, grad, x, slope, is_result: writer.elementwise(
    torch.float32, (grad, x, float(slope)), _call("torch_leaky_relu_backward")
)


@_operator("elu_backward")
def _elu_backward(
    writer: Writer, meta: Any, grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any
) -> Value:
    name = "torch_elu_backward_of_result" if is_result else "torch_elu_backward"
    numbers = (float(alpha), float(scale), float(input_scale))
    return writer.elementwise(torch.float32, (grad, *numbers, x), _call(name))


# ---- what makes a value, or changes its dtype


@_operator("_to_copy", "to")
def _to(writer: Writer, meta: Any, x: Any, *_: Any, **__: Any) -> Value:
    return writer.cast(writer.value(x), meta.dtype)


@_operator("convert_element_type")
def _convert(writer: Writer, meta: Any, x: Any, dtype: torch.dtype) -> Value:
    return writer.cast(writer.value(x), dtype)


@_operator("clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous")
def _same(writer: Writer, meta: Any, x: Any, **_: Any) -> Any:
    return x


def _filled(writer: Writer, meta: Any, number: Any) -> Value:
    value = writer.cast(writer.value(number), meta.dtype)
    return writer.broadcast(value, tuple(meta.shape))


OPERATORS["scalar_tensor"] = lambda writer, meta, number, **_: _filled(writer, meta, number)
OPERATORS["full"] = lambda writer, meta, size, number, **_: _filled(writer, meta, number)
OPERATORS["fill"] = lambda writer, meta, x, number: _filled(writer, meta, number)
OPERATORS["full_like"] = lambda writer, meta, x, number, **_: _filled(writer, meta, number)
OPERATORS["new_full"] = lambda writer, meta, x, size, number, **_: _filled(writer, meta, number)


def _constant(text: str) -> Operator:
    value = Value(torch.int32, (), (text,))
    return lambda writer, meta, *_, **__: _filled(writer, meta, value)


for _name in ("zeros", "zeros_like", "new_zeros", "empty_like", "_efficientzerotensor"):
    OPERATORS[_name] = _constant("0")
for _name in ("ones", "ones_like", "new_ones"):
    OPERATORS[_name] = _constant("1")


# ---- indexing, and shapes of short vectors


@_operator("index")
def _index(writer: Writer, meta: Any, x: Any, indices: Sequence[Any]) -> Any:
    if not isinstance(x, View):
        return _choose(writer, writer.value(x), indices)
    view = x
    dims = list(view.dims)
    free = [(place, dim) for place, dim in enumerate(dims) if isinstance(dim, range)]
    for (place, dim), index in zip(free, indices, strict=False):
        if index is not None:
            dims[place] = _of_range(writer, dim, _index_item(writer, index))
    return view._replace(dims=tuple(dims))


def _index_item(writer: Writer, index: Any) -> str:
    value = writer.value(index)
    if value.shape:
        raise Refused(f"indexes by a vector of shape {list(value.shape)}")
    if value.dtype == torch.bool:
        raise Refused("indexes by a bool")
    return value.items[0]


def _without(value: Value, dim: int, index: int) -> Value:
    """A value at an index of a dimension, which the result does not have."""
    shape = value.shape[:dim] + value.shape[dim + 1 :]
    return _take(value, shape, lambda place: (*place[:dim], index, *place[dim:]))


def _choose(writer: Writer, value: Value, indices: Sequence[Any]) -> Value:
    """Elements of a short vector in between, by indices that only the kernel knows."""
    for dim in reversed([place for place, index in enumerate(indices) if index is not None]):
        extent = value.shape[dim]
        index = writer.let("int", f"wrapped({_index_item(writer, indices[dim])}, {extent})")
        shape = value.shape[:dim] + value.shape[dim + 1 :]
        choices = [_without(value, dim, i) for i in range(extent)]
        chosen = choices[-1].items
        for i, choice in reversed(list(enumerate(choices[:-1]))):
            chosen = tuple(
                f"({_is_at(index, i, extent)} ? {one} : {other})"
                for one, other in zip(choice.items, chosen, strict=True)
            )
        names = tuple(writer.let(_C_TYPES[value.dtype], item) for item in chosen)
        value = Value(value.dtype, shape, names)
    return value


def _is_at(index: str, place: int, extent: int) -> str:
    """Whether a `wrapped` index means the element at ``place`` of ``extent`` elements."""
    if extent == 1:
        return "true"
    if place == 0:
        return f"{index} < 1"
    return f"{index} == {place}" if place < extent - 1 else f"{index} > {place - 1}"


def _of_range(writer: Writer, dim: range, item: str) -> str:
    """An index into what a slice left of a dimension, as an index into the dimension."""
    if dim.start == 0 and dim.step == 1:
        return item  # kernels move it inside the dimension
    index = f"inside({item}, {len(dim)})"
    return writer.let("int", f"{dim.start} + {dim.step} * {index}")


@_operator("select")
def _select(writer: Writer, meta: Any, x: Any, dim: int, index: Any) -> Any:
    if not isinstance(index, int):
        return _index(writer, meta, x, [None] * (dim % len(x.shape)) + [index])
    if isinstance(x, View):
        return x.with_dim(dim, lambda whole: str(whole[index]))
    value = writer.value(x)
    dim %= len(value.shape)
    return _without(value, dim, index % value.shape[dim])


@_operator("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(
    writer: Writer, meta: Any, x: Any, indices: Sequence[Any], put: Any, accumulate: bool = False, *_: Any
) -> Value:
    """A short vector with another element, or one to which something is added."""
    value = writer.value(x)
    chosen = {
        dim: writer.let("int", f"wrapped({_index_item(writer, index)}, {value.shape[dim]})")
        for dim, index in enumerate(indices)
        if index is not None
    }
    kept = [dim for dim in range(len(value.shape)) if dim not in chosen]
    new = writer.broadcast(
        writer.cast(writer.value(put), meta.dtype), tuple(value.shape[dim] for dim in kept)
    )
    items = []
    for place, old in zip(_places(value.shape), value.items, strict=True):
        here = " & ".join(f"({_is_at(index, place[dim], value.shape[dim])})" for dim, index in chosen.items())
        item = new.at([place[dim] for dim in kept])
        item = f"torch_add({old}, {item})" if accumulate else item
        items.append(writer.let(_C_TYPES[meta.dtype], f"{here} ? {item} : {old}"))
    return Value(meta.dtype, value.shape, tuple(items))


def _in_zeros(writer: Writer, meta: Any, grad: Any, dim: int, kept: Sequence[int]) -> Value:
    """Zeros, but for these indices of a dimension, of which there is a gradient."""
    part = writer.value(grad)
    dim %= len(meta.shape)
    part = part._replace(shape=(*part.shape[:dim], len(kept), *meta.shape[dim + 1 :]))  # of a select too
    zero = writer.cast(Value(torch.int32, (), ("0",)), meta.dtype).items[0]
    items = []
    for place in _places(meta.shape):
        if place[dim] in kept:
            items.append(part.at((*place[:dim], kept.index(place[dim]), *place[dim + 1 :])))
        else:
            items.append(zero)
    return Value(meta.dtype, tuple(meta.shape), tuple(items))


OPERATORS["select_backward"] = lambda writer, meta, grad, sizes, dim, index: _in_zeros(
    writer, meta, grad, dim, [index % sizes[dim]]
)
OPERATORS["slice_backward"] = lambda writer, meta, grad, sizes, dim, start, end, step: _in_zeros(
    writer, meta, grad, dim, range(sizes[dim])[slice(start, end, step)]
)


@_operator("stack")
def _stack(writer: Writer, meta: Any, parts: Sequence[Any], dim: int = 0) -> Value:
    values = [writer.cast(writer.value(part), meta.dtype) for part in parts]
    dim %= len(meta.shape)
    items = [values[place[dim]].at((*place[:dim], *place[dim + 1 :])) for place in _places(meta.shape)]
    return Value(meta.dtype, tuple(meta.shape), tuple(items))


@_operator("slice")
def _slice(
    writer: Writer, meta: Any, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if isinstance(x, View):
        return x.with_dim(dim, lambda whole: whole[slice(start, end, step)])
    value = writer.value(x)
    dim = dim % len(value.shape)
    kept = range(value.shape[dim])[slice(start, end, step)]
    return _take(value, tuple(meta.shape), lambda place: (*place[:dim], kept[place[dim]], *place[dim + 1 :]))


@_operator("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
def _reshape(writer: Writer, meta: Any, x: Any, *_: Any) -> Value:
    return writer.value(x)._replace(shape=tuple(meta.shape))


@_operator("expand")
def _expand(writer: Writer, meta: Any, x: Any, *_: Any, **__: Any) -> Value:
    return writer.broadcast(writer.value(x), tuple(meta.shape))


@_operator("unbind")
def _unbind(writer: Writer, meta: Any, x: Any, dim: int = 0) -> list[Any]:
    return [_select(writer, one, x, dim, i) for i, one in enumerate(meta)]


def _reduction(function: str, average: bool = False) -> Operator:
    def operator(
        writer: Writer, meta: Any, x: Any, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> Value:
        dtype = _computed(meta.dtype)
        value = writer.cast(writer.value(x), dtype)
        rank = len(value.shape)
        if dims is None or dims == []:
            dims = range(rank)
        reduced = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)} if rank else set()
        kept = [range(1) if i in reduced else range(extent) for i, extent in enumerate(value.shape)]
        whole = [range(extent) if i in reduced else None for i, extent in enumerate(value.shape)]
        (zero,) = writer.cast(Value(torch.int32, (), ("0",)), dtype).items
        items = []
        for place in itertools.product(*kept):
            choices = [(p,) if w is None else w for w, p in zip(whole, place, strict=True)]
            terms = [value.at(inner) for inner in itertools.product(*choices)]
            # torch itself refuses the largest and the smallest of none.
            total = terms[0] if terms else zero
            for term in terms[1:]:
                total = writer.let(_C_TYPES[dtype], f"{function}({total}, {term})")
            if average:
                total = writer.let("float", f"{total} / {len(terms)}.0f")
            items.append(total)
        return writer.cast(Value(dtype, tuple(meta.shape), tuple(items)), meta.dtype)

    return operator


OPERATORS["sum"] = _reduction("torch_add")
OPERATORS["mean"] = _reduction("torch_add", average=True)
OPERATORS["amax"] = _reduction("torch_maximum")
OPERATORS["amin"] = _reduction("torch_minimum")
