"""The scheduling plan of a decode call: how its KV blocks are spread over the GPU.

A plan is two int32 arrays, either bare or inside a `FlashMLASchedMeta`. The two forms order the fields of a
row differently. `read_plan` reads either form, and `check_plan` checks what it read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeGuard
from weakref import ref

from .. import jit
from ..call.arguments import Arg, Sizes, check_arguments, check_dtype, check_once
from ..call.arrays import READERS, address_of, is_array
from ..call.checks import INT32_MAX
from ..call.frameworks import Fields, Framework
from ..kernels import mla_metadata
from ..kernels.common import BLOCK_TOKENS, MAX_GRID_YZ


@dataclass(slots=True)
class SchedConfig:
    """The call that a `FlashMLASchedMeta` was filled for; every field must match when it is used again.

    `h_k` is the number of KV heads (`h_kv`). `topk` and the `extra_*` fields are None for dense decoding, the
    latter also without an extra cache.
    """

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool = False
    topk: int | None = None
    extra_page_block_size: int | None = None
    extra_topk: int | None = None
    enable_batch_invariant: bool = False


_CONFIG_FIELDS = tuple([field.name for field in fields(SchedConfig)])
# Fields with a default came with later versions of FlashMLA: the configs of earlier ones lack them.
_CONFIG_DEFAULTS = tuple([None if f.default is MISSING else f.default for f in fields(SchedConfig)])


def fields_of(config: SchedConfig) -> tuple[Any, ...]:
    """List the values of `_CONFIG_FIELDS`. A loop or `attrgetter` would take twice the time."""
    return (
        config.b,
        config.s_q,
        config.h_q,
        config.page_block_size,
        config.h_k,
        config.causal,
        config.is_fp8_kvcache,
        config.topk,
        config.extra_page_block_size,
        config.extra_topk,
        config.enable_batch_invariant,
    )


@dataclass(eq=False)
class FlashMLASchedMeta:
    """A scheduling plan: the first decode call with it computes it, later ones of the same kind reuse it.

    Objects of another library with the first four fields serve as well, in every place where this class does.

    Lengths are not part of the configuration: when `cache_seqlens` changes (in sparse decoding `topk_length`
    or `extra_topk_length`), take a new object, or recompute this one in place with `get_mla_metadata(...,
    out=plan)`. All fields may be written from outside; a caller with a scheduler of its own sets the two
    arrays before the first call. One object must not be filled by two threads at once.

    Attributes
    ----------
    have_initialized : bool
        True once a decode call has filled the object.
    config : SchedConfig or None
        The configuration it was filled for.
    tile_scheduler_metadata : array or None
        int32 `[num_sm_parts, 8]`, one row per partition: begin_req, end_req (inclusive), begin_block,
        end_block (exclusive), begin_split, first request is split, last request is split, pad. Blocks are 64
        tokens. A partition is idle when begin_req >= b, begin > end or begin < 0. (Plans passed as bare
        tensors have another order: see `get_mla_metadata`.)
    num_splits : array or None
        int32 `[>= b + 1]`, exclusive prefix sum of the number of splits per request.
    enable_batch_invariant : bool
        The plan is to be batch-invariant (see `get_mla_metadata`).
    """

    Config = SchedConfig  # FlashMLA's name of it

    have_initialized: bool = False
    config: SchedConfig | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None
    enable_batch_invariant: bool = False


IDLE = -1
"""The begin of a partition without work, whatever the batch of the call that reads it."""

_PLAN_FIELDS = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")
"""The fields that make an object of any library a plan."""


class PlanArrays(NamedTuple):
    """The two arrays of a plan."""

    rows: int
    num_splits: int
    kind: tuple[Any, ...]
    """The properties that checks of the two depend on."""
    views: tuple[Fields, Fields]


GivenPlan = tuple[FlashMLASchedMeta | None, PlanArrays | None, bool]
"""The plan of one decode call: the object that holds it, its arrays and whether it is batch-invariant.

There is no object with bare arrays, and there are no arrays in an empty object. The rows of an object order
their fields differently from bare rows.
"""


class PreparedDecode(NamedTuple):
    """The fields of a `PreparedCall`, its plan's number of partitions, and the call as plans know it."""

    allocate: Callable[[], list[Any]]
    launch: Callable[..., None] | None
    q_is_copied: bool
    rope_bytes: int
    mixes_frameworks: bool
    num_parts: int
    config: SchedConfig
    config_fields: tuple[Any, ...]


def read_plan(tile_scheduler_metadata: Any, num_splits: Any, batch_invariant: bool) -> GivenPlan:
    """Read the plan of a decode call, which may have any of its forms."""
    plan: FlashMLASchedMeta | None = None
    rows = tile_scheduler_metadata
    if isinstance(rows, FlashMLASchedMeta) or num_splits is None and is_plan_object(rows):
        if num_splits is not None:
            refuse_splits(num_splits)
        plan = rows
        rows, num_splits = rows.tile_scheduler_metadata, rows.num_splits
        if getattr(plan, "enable_batch_invariant", False):  # objects of other libraries lack it
            batch_invariant = True
        if rows is None:
            if num_splits is not None:
                refuse_one_array()
            return plan, None, batch_invariant
    elif num_splits is None:
        refuse_what_is_no_plan(rows)
        refuse_no_splits()
    return plan, _read_arrays(rows, num_splits), batch_invariant


_latest: tuple[ref[Any], ref[Any], Callable[[Any], int], tuple[Any, ...], PlanArrays] | None = None
"""The arrays of the latest plan, the function that gives addresses, their addresses and shapes, and what was
read of them. It is replaced as a whole, so threads see one plan or another.
"""


def _read_arrays(rows: Any, num_splits: Any) -> PlanArrays:
    """Read the arrays of a plan, and remember them by weak references.

    All layers of a decoding step share a plan. To recognise its arrays by identity, address and shape takes
    half the time of reading them. Strides that change in place, but not the shape, stay unnoticed. An array
    of another library is not remembered, because its view belongs to an array made for this call.
    """
    global _latest
    if _latest is not None:
        old_rows, old_splits, pointer, state, found = _latest
        if old_rows() is rows is not None and old_splits() is num_splits is not None:
            if (pointer(rows), pointer(num_splits), rows.shape, num_splits.shape) == state:
                return found
    if type(rows) not in READERS:
        refuse_what_is_no_plan(rows)
    views = (
        READERS[type(rows)](rows, "tile_scheduler_metadata"),
        READERS[type(num_splits)](num_splits, "num_splits"),
    )
    (rows_ptr, rows_shape, *_, framework, owner), (splits_ptr, splits_shape, *_, splits_owner) = views
    found = PlanArrays(rows_ptr, splits_ptr, (rows_ptr & 15, views[0][1:6], views[1][1:6]), views)
    if owner is rows and splits_owner is num_splits and views[1][5] is framework:
        kept = found._replace(views=((*views[0][:6], None), (*views[1][:6], None)))
        state = (rows_ptr, splits_ptr, rows_shape, splits_shape)
        _latest = (ref(rows), ref(num_splits), framework.pointer, state, kept)
    return found


def check_plan(plan: GivenPlan, config: SchedConfig, device: int, framework: Framework) -> int:
    """Check the plan of a call of this configuration; returns its number of partitions.

    The arrays of an empty object are still to be computed, and the kernel for that is loaded.
    """
    holder, arrays, batch_invariant = plan
    if holder is not None and holder.have_initialized:
        check_config(holder.config, fields_of(config))
    if arrays is None:
        return _load_kernel(config, device, framework)
    if batch_invariant and config.b > MAX_GRID_YZ:
        raise ValueError(
            f"q: expected at most {MAX_GRID_YZ} requests with a batch-invariant plan, got {config.b}"
        )
    return check_plan_arrays(*arrays.views, config.b)


def is_plan_object(given: Any) -> TypeGuard[FlashMLASchedMeta]:
    """Whether this is a `FlashMLASchedMeta` or another library's object with the same fields."""
    if isinstance(given, FlashMLASchedMeta):
        return True
    return not isinstance(given, type) and all(hasattr(given, name) for name in _PLAN_FIELDS)


def refuse_splits(num_splits: Any) -> NoReturn:
    """Raise for a num_splits that is given beside an object."""
    raise ValueError(
        "num_splits: expected None with a FlashMLASchedMeta, which holds its own, got "
        f"{type(num_splits).__name__}"
    )


def refuse_no_splits() -> NoReturn:
    """Raise for bare rows without num_splits."""
    raise ValueError(
        "num_splits: expected an int32 array with a tensor as tile_scheduler_metadata, got None; pass "
        "both items of what get_mla_metadata returned"
    )


def refuse_one_array() -> NoReturn:
    """Raise for an object that has num_splits alone."""
    raise ValueError(
        "tile_scheduler_metadata: expected both arrays of the FlashMLASchedMeta or none, got num_splits"
    )


def refuse_what_is_no_plan(given: Any) -> None:
    """Raise for objects that callers pass by mistake in place of a plan; arrays are checked elsewhere."""
    if is_plan_object(given):
        raise ValueError(
            f"num_splits: expected None with a {type(given).__name__}, which holds its own, got an array"
        )
    if given is None:
        got, remedy = "NoneType", "take a plan from get_mla_metadata()"
    elif isinstance(given, type):
        got, remedy = f"the class {given.__name__}", f"make an object of it: {given.__name__}()"
    elif isinstance(given, (tuple, list)):
        got = f"{type(given).__name__} of {len(given)}"
        remedy = (
            "get_mla_metadata returns a pair: give its first item as tile_scheduler_metadata and its second "
            "as num_splits"
        )
    elif any(hasattr(given, name) for name in _PLAN_FIELDS):
        missing = [name for name in _PLAN_FIELDS if not hasattr(given, name)]
        got = f"a {type(given).__name__} without {', '.join(missing)}"
        remedy = "a plan object of another library needs all four fields; take one from get_mla_metadata()"
    elif not is_array(given):
        got, remedy = type(given).__name__, "take a plan from get_mla_metadata()"
    else:
        return
    raise TypeError(
        f"tile_scheduler_metadata: expected a FlashMLASchedMeta or an int32 array, got {got}; {remedy}"
    )


def _load_kernel(config: SchedConfig, device: int, framework: Framework) -> int:
    """Load the kernel that computes the plan of an empty object; returns its number of partitions."""
    if config.b > mla_metadata.MAX_BATCH:
        raise ValueError(f"q: expected at most {mla_metadata.MAX_BATCH} requests for a plan, got {config.b}")
    num_parts = count_parts(device, config.s_q, config.h_q, config.h_k, config.topk is not None)
    if config.b:
        mla_metadata.load(config.b, device, framework.capture_query(device))
    return num_parts


def make_plan(
    given: Fields,
    b: int,
    num_parts: int,
    tokens: mla_metadata.TokenCounts,
    object_layout: bool,
    batch_invariant: bool,
) -> tuple[Any, Any]:
    """Make the two arrays of a plan where the array ``given`` is, and enqueue their computation."""
    _, _, _, _, device, framework, _ = given
    rows = framework.empty((num_parts, mla_metadata.PLAN_COLUMNS), "int32", device)
    num_splits = framework.empty((b + 1,), "int32", device)
    if b:
        mla_metadata.launch(
            device=device,
            stream=framework.current_stream(device),
            capturing=framework.capture_query(device),
            tokens=tokens,
            b=b,
            num_parts=num_parts,
            sched_meta=framework.pointer(rows),
            num_splits=framework.pointer(num_splits),
            splits_length=b + 1,
            object_layout=object_layout,
            batch_invariant=batch_invariant,
        )
    else:
        framework.fill(rows, IDLE)
        framework.fill(num_splits, 0)
    return rows, num_splits


_LENGTHS = (
    Arg("cache_seqlens", "int32", "b", has_rows=True),
    Arg("topk_length", "int32", "b", has_rows=True),
    Arg("extra_topk_length", "int32", "b", has_rows=True),
)


def plan_object(
    s_q: int,
    h_q: int,
    num_heads_k: int,
    cache_seqlens: Any,
    indices: Any,
    topk_length: Any,
    extra_indices_in_kvcache: Any,
    extra_topk_length: Any,
    enable_batch_invariant: bool,
) -> tuple[Any, Any]:
    """Make the two arrays that `flash_mla_with_kvcache` makes for an empty object in such a call.

    Dense calls give ``cache_seqlens``, sparse ones ``indices``, of which only the shapes count.
    """
    given = {
        "indices": indices,
        "cache_seqlens": cache_seqlens,
        "topk_length": topk_length,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    views = {name: READERS[type(x)](x, name) for name, x in given.items() if x is not None}
    b = check_once(_check_lengths, views)
    first = next(iter(views.values()))
    _, _, _, _, device, framework, _ = first
    lengths, limits, extra_limits = [address_of(views.get(name)) for name, *_ in _LENGTHS]
    tokens, topk = mla_metadata.TokenCounts(lengths), None
    if indices is not None:
        widths = [
            views[name][1][2] if name in views else 0 for name in ("indices", "extra_indices_in_kvcache")
        ]
        topk, extra_topk = widths
        tokens = mla_metadata.TokenCounts(limits, extra_limits, topk, extra_topk)
    config = SchedConfig(
        b,
        s_q,
        h_q,
        BLOCK_TOKENS,
        num_heads_k,
        causal=False,
        topk=topk,
        enable_batch_invariant=enable_batch_invariant,
    )
    num_parts = _load_kernel(config, device, framework)
    return make_plan(first, b, num_parts, tokens, object_layout=True, batch_invariant=enable_batch_invariant)


def _check_lengths(views: dict[str, Fields]) -> int:
    """Check the lengths of requests; returns the number of requests, which the first array has too."""
    _, (b, *_), *_ = next(iter(views.values()))
    return check_arguments(_LENGTHS, views, Sizes(b=b))["b"]


def mark_plan(plan: FlashMLASchedMeta, config: SchedConfig, made: tuple[Any, Any] | None) -> None:
    """Note in the object that a call has used it: the configuration, and the arrays computed for it, if any.

    Called last, so that a call that fails leaves the object as it was.
    """
    if made is not None:
        plan.tile_scheduler_metadata, plan.num_splits = made
    plan.config = config_for(plan, config)
    plan.have_initialized = True


def config_for(plan: FlashMLASchedMeta, config: SchedConfig) -> Any:
    """Copy `config`, into the class that an object of another library has for it if the fields are ours."""
    made = replace(config)
    wanted = getattr(type(plan), "Config", SchedConfig)
    if wanted is SchedConfig or not is_dataclass(wanted):
        return made
    names = [field.name for field in fields(wanted)]
    if not set(names) <= set(_CONFIG_FIELDS):
        return made
    return wanted(**{name: getattr(made, name) for name in names})


def check_config(planned: Any, wanted: tuple[Any, ...]) -> None:
    """Check that an object was filled for this call, whose `fields_of` its configuration are ``wanted``.

    The configuration of the object may be of the caller's class.
    """
    if planned.__class__ is SchedConfig and fields_of(planned) == wanted:
        return
    if planned is None:
        raise ValueError(
            "tile_scheduler_metadata: expected a FlashMLASchedMeta with a config once have_initialized is "
            "True, got config None"
        )
    for field, default, needed in zip(_CONFIG_FIELDS, _CONFIG_DEFAULTS, wanted, strict=True):
        given = getattr(planned, field, default)
        if given != needed:
            raise ValueError(
                f"tile_scheduler_metadata: expected a plan for {field} = {needed}, as in this call, got a "
                f"FlashMLASchedMeta filled for {field} = {given}; take one from get_mla_metadata() for each "
                "configuration"
            )


def check_plan_arrays(
    rows: Fields,
    num_splits: Fields,
    b: int,
    names: tuple[str, str] = ("tile_scheduler_metadata", "num_splits"),
) -> int:
    """Check the two arrays of a plan for `b` requests, but their places; returns the number of partitions."""
    of_rows, of_splits = names
    check_dtype(of_rows, rows, "int32")
    ptr, shape, strides, *_ = rows
    if len(shape) != 2 or shape[1] != mla_metadata.PLAN_COLUMNS or not 0 < shape[0] <= MAX_GRID_YZ:
        raise ValueError(
            f"{of_rows}: expected shape [num_sm_parts, {mla_metadata.PLAN_COLUMNS}] with 1 to {MAX_GRID_YZ} "
            f"rows, got {list(shape)}"
        )
    num_parts = shape[0]
    if strides[1] != 1 or strides[0] != mla_metadata.PLAN_COLUMNS and num_parts > 1 or ptr & 15:
        raise ValueError(
            f"{of_rows}: expected a contiguous array at a 16-byte aligned address, got strides "
            f"{list(strides)} (elements), address {ptr:#x}"
        )
    check_dtype(of_splits, num_splits, "int32")
    _, shape, strides, *_ = num_splits
    if len(shape) != 1 or not b < shape[0] <= INT32_MAX:
        raise ValueError(f"{of_splits}: expected shape [n] with n >= b + 1 = {b + 1}, got {list(shape)}")
    if strides[0] != 1 and b > 0:
        raise ValueError(f"{of_splits}: expected a contiguous array, got stride {strides[0]} (elements)")
    return num_parts


def count_parts(device: int, s_q: int, h_q: int, h_kv: int, is_sparse: bool) -> int:
    """Count the rows of a new plan, which fill the GPU."""
    sm_count = jit.device_info(device).sm_count
    if is_sparse:
        return mla_metadata.num_sm_parts_sparse(sm_count, s_q, h_q)
    return mla_metadata.num_sm_parts(sm_count, s_q, h_q, h_kv)
