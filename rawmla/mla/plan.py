"""The scheduling plan of a decode call: how its KV blocks are spread over the GPU.

`get_mla_metadata` keeps the names, order and meaning of FlashMLA's arguments. A plan is two int32 arrays,
either bare or inside a `FlashMLASchedMeta`; the order of a row's fields differs between the two forms.
`resolve_plan` makes of either what a decode call needs.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from .. import jit
from ..call import checks, tracing
from ..call.arrays import READERS, Fields, Framework, address_of, inspect, is_array, read_given
from ..call.memo import BatchPlace, LatestPair
from ..kernels import mla_metadata
from ..kernels.common import BLOCK_TOKENS, MAX_GRID_YZ, MAX_TOPK, ceil_div
from .arguments import refuse_dense_fp8
from .traced import operators

__all__ = [
    "FlashMLASchedMeta",
    "PlanArrays",
    "PlanConfigs",
    "ResolvedPlan",
    "SchedConfig",
    "batch_invariant_of",
    "check_config",
    "check_topk_of",
    "compute_plan",
    "config_for",
    "fields_of",
    "get_mla_metadata",
    "given_arrays",
    "is_empty",
    "is_plan_object",
    "mark_plan",
    "note_batch_invariant",
    "plan_object",
    "refuse_what_is_no_plan",
    "resolve_plan",
]


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
    """The values of `_CONFIG_FIELDS`. Written out, which takes half the time of a loop or `attrgetter`."""
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


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
    enable_batch_invariant: bool = False,
    out: Any = None,
) -> tuple[Any, Any]:
    """Plan how a decode call spreads its KV blocks over the GPU.

    Without arguments (`enable_batch_invariant` aside) returns `(FlashMLASchedMeta(), None)`: an empty plan
    that the first decode call fills on the device. With arguments the plan is computed now, on the device,
    into two tensors.

    Parameters
    ----------
    cache_seqlens : array
        int32 `[b]`, contiguous, on the GPU: KV tokens per request, 0 and up. b is at most 16384.
    num_q_tokens_per_head_k : int
        `s_q * h_q // h_kv`. `num_heads_per_head_k` is the older name of the same argument.
    num_heads_k : int
        `h_kv`.
    num_heads_q : int, optional
        `h_q`. None: `num_q_tokens_per_head_k * num_heads_k`, that is, s_q = 1. The plan is the same in dense
        decoding; with `topk` give it when s_q > 1, or the plan has more partitions than fill the GPU.
    is_fp8_kvcache : bool
        Of the cache that the plan will be used on; True needs `topk`.
    topk : int, optional
        A plan for sparse decoding: columns of `indices`. Of `cache_seqlens` only the shape counts then, and
        `num_heads_k` is 1. With an extra cache, the sum of both topk, each rounded up to a multiple of 64.
        Such a plan does not know `topk_length` and serves any; that of an empty `FlashMLASchedMeta` does,
        and leaves out the blocks behind it.
    num_heads_per_head_k : int, optional
        See `num_q_tokens_per_head_k`; give one of the two.
    enable_batch_invariant : bool
        Split every request by its own length alone, so that its result has the same bits in any batch. A
        plan of bare tensors needs `enable_batch_invariant=True` on the decode call too, which sizes its
        scratch by it; a `FlashMLASchedMeta` remembers it.
    out : pair of arrays or FlashMLASchedMeta, optional
        A plan to recompute in place: `(tile_scheduler_metadata, num_splits)` of an earlier call, or an
        object. int32 `[n, 8]` with any n >= 1 and int32 `[>= b + 1]`, both contiguous, on the device of
        `cache_seqlens`; an object without arrays gets new ones, which the next decode call uses. The batch
        may be smaller than the one the arrays were made for: all of num_splits is written, so that a call for
        the larger batch leaves the results of the other requests alone.
        Between replays of a captured CUDA graph this updates the plan that the graph reads. `topk` must be
        that of the call which filled an object, in blocks of 64.

    Returns
    -------
    tile_scheduler_metadata : array or FlashMLASchedMeta
        int32 `[num_sm_parts, 8]` in the framework of `cache_seqlens`, one row per partition: begin_req,
        begin_block (of 64 tokens), end_req (inclusive), end_block (exclusive), begin_split, 3 more of the
        library's own. Any consumer may copy it; a decode call takes any number of rows. `out` if that was
        given.
    num_splits : array or None
        int32 `[b + 1]`, exclusive prefix sum of splits per request. None with a `FlashMLASchedMeta`.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, dtype, shape or device; raised before anything is launched.
    NotImplementedError
        `is_fp8_kvcache` without `topk`: dense decoding has no FP8 caches.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, a compiled kernel inside a graph capture.

    Notes
    -----
    Allocates the two arrays (unless `out` is given) with the caller's framework and enqueues one kernel on
    its current stream. Never synchronises; legal inside a CUDA-graph capture once `rawmla.warmup` has
    loaded the kernel. The row layout is FlashMLA's (github.com/deepseek-ai/FlashMLA).
    """
    batch_invariant = checks.as_bool("enable_batch_invariant", enable_batch_invariant)
    if checks.as_bool("is_fp8_kvcache", is_fp8_kvcache) and topk is None:
        refuse_dense_fp8()
    if num_heads_per_head_k is not None:
        if num_q_tokens_per_head_k is not None:
            raise TypeError(
                "num_heads_per_head_k: expected None when num_q_tokens_per_head_k, its newer name, is given, "
                f"got {num_heads_per_head_k!r}"
            )
        num_q_tokens_per_head_k = num_heads_per_head_k
    if all(x is None for x in (cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, out)):
        return FlashMLASchedMeta(enable_batch_invariant=batch_invariant), None
    if tracing.is_traced(cache_seqlens):
        return operators().get_mla_metadata(
            cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, batch_invariant, out
        )

    lengths = inspect(cache_seqlens, "cache_seqlens")
    ptr, shape, strides, dtype, device, framework, _ = lengths
    if dtype != "int32":
        raise TypeError(f"cache_seqlens: expected dtype int32, got {dtype}")
    if len(shape) != 1:
        raise ValueError(f"cache_seqlens: expected shape [b], got {list(shape)}")
    b = shape[0]
    if b > mla_metadata.MAX_BATCH:
        raise ValueError(f"cache_seqlens: expected at most {mla_metadata.MAX_BATCH} requests, got {b}")
    if b > 1 and strides[0] != 1:
        raise ValueError(f"cache_seqlens: expected a contiguous array, got stride {strides[0]} (elements)")
    h_kv = checks.as_count("num_heads_k", num_heads_k)
    rows_q = checks.as_count("num_q_tokens_per_head_k", num_q_tokens_per_head_k) * h_kv
    h_q = rows_q if num_heads_q is None else checks.as_count("num_heads_q", num_heads_q)
    if h_q % h_kv or rows_q % h_q:
        raise ValueError(
            "num_heads_q: expected a multiple of num_heads_k that divides num_q_tokens_per_head_k * "
            f"num_heads_k = {rows_q}, got {h_q} with num_heads_k = {h_kv}"
        )

    tokens = mla_metadata.TokenCounts(ptr)
    if topk is not None:
        topk = checks.as_count("topk", topk)
        if topk > MAX_TOPK:
            raise ValueError(f"topk: expected an int below 2**30, got {topk}")
        tokens = mla_metadata.TokenCounts(0, most=topk)
        if h_kv != 1:
            raise ValueError(f"num_heads_k: expected 1 with topk, got {h_kv}")

    plan: FlashMLASchedMeta | None = out if is_plan_object(out) else None
    if plan is not None:
        batch_invariant = batch_invariant_of(plan, batch_invariant)
        check_topk_of(plan, topk)
    is_new = out is None or plan is not None and is_empty(plan)
    if is_new:
        num_parts = _num_parts(device, rows_q // h_q, h_q, h_kv, topk is not None)
        rows, splits = _empty_arrays(framework, num_parts, b, device)
        rows_ptr, splits_ptr = framework.pointer(rows), framework.pointer(splits)
        splits_length = b + 1
    else:
        rows, splits = given_arrays(out)
        splits_view = inspect(splits, "out[1]")
        rows_ptr, splits_ptr, num_parts, _ = _check_arrays(
            inspect(rows, "out[0]"),
            splits_view,
            b,
            device,
            framework,
            "cache_seqlens",
            ("out[0]", "out[1]"),
        )
        splits_length = splits_view.shape[0]

    if b:
        mla_metadata.launch(
            device=device,
            stream=framework.current_stream(device),
            capturing=framework.capture_query(device),
            tokens=tokens,
            b=b,
            num_parts=num_parts,
            sched_meta=rows_ptr,
            num_splits=splits_ptr,
            splits_length=splits_length,
            object_layout=plan is not None,
            batch_invariant=batch_invariant,
        )
    else:
        # begin < 0: every partition is idle, whatever the batch of the call that reads it. Given arrays may
        # be of another framework.
        for array, name, value in ((rows, "out[0]", -1), (splits, "out[1]", 0)):
            view = inspect(array, name)
            view.framework.fill(view.array, value)
    if plan is None:
        return rows, splits
    if is_new:
        plan.tile_scheduler_metadata, plan.num_splits = rows, splits
    note_batch_invariant(plan, batch_invariant)
    return plan, None


class PlanArrays(NamedTuple):
    """The two arrays of a plan as device addresses."""

    sched_meta: int
    num_splits: int
    num_parts: int
    owners: tuple[Any, ...]
    """Keep arrays of other libraries alive during the call."""


class ResolvedPlan(NamedTuple):
    """The plan of one decode call."""

    arrays: PlanArrays | None
    """None: the plan is an empty object, and `compute_plan` makes its arrays."""
    num_parts: int
    is_object: bool
    """The rows of an object have another order of fields than a bare tensor."""
    batch_invariant: bool
    unmarked: FlashMLASchedMeta | None
    """An object that no call has used yet: `mark_plan` has to follow once the call's kernels are enqueued."""


class PlanConfigs(NamedTuple):
    """Configurations of a call, without and with a batch-invariant plan, and the values of their fields."""

    plain: SchedConfig
    invariant: SchedConfig
    plain_fields: tuple[Any, ...]
    invariant_fields: tuple[Any, ...]

    @classmethod
    def of(cls, plain: SchedConfig) -> PlanConfigs:
        """``plain`` and its like."""
        invariant = replace(plain, enable_batch_invariant=True)
        return cls(plain, invariant, fields_of(plain), fields_of(invariant))


_PLAN_FIELDS = ("have_initialized", "config", "tile_scheduler_metadata", "num_splits")
"""What makes an object of any library a plan."""

_latest_plan = LatestPair()


def resolve_plan(
    tile_scheduler_metadata: Any,
    num_splits: Any,
    enable_batch_invariant: bool,
    configs: PlanConfigs,
    place: BatchPlace,
) -> ResolvedPlan:
    """Check the plan of a decode call, in any of its forms, and say where it lies.

    ``configs`` are those of the call. Nothing is allocated, launched or changed.
    """
    unmarked = None
    is_object = isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or (
        num_splits is None and is_plan_object(tile_scheduler_metadata)
    )
    if is_object:
        if num_splits is not None:
            raise ValueError(
                "num_splits: expected None with a FlashMLASchedMeta, which holds its own, got "
                f"{type(num_splits).__name__}"
            )
        plan: FlashMLASchedMeta = tile_scheduler_metadata
        rows, num_splits = plan.tile_scheduler_metadata, plan.num_splits
        if getattr(plan, "enable_batch_invariant", False):  # objects of other libraries lack it
            enable_batch_invariant = True
        if plan.have_initialized:
            check_config(plan.config, configs, enable_batch_invariant)
        else:
            unmarked = plan
        if rows is None:
            return _empty_plan(plan, configs.plain, enable_batch_invariant, place)
    else:
        rows = tile_scheduler_metadata
        if num_splits is None:
            refuse_what_is_no_plan(rows)
            raise ValueError(
                "num_splits: expected an int32 array with a tensor as tile_scheduler_metadata, got None; "
                "pass both items of what get_mla_metadata returned"
            )
    found: ResolvedPlan | None = _latest_plan.find(rows, num_splits, place)
    if (
        found is None
        or found.is_object is not is_object
        or found.batch_invariant is not enable_batch_invariant
    ):
        b, device, framework = place
        if enable_batch_invariant and b > MAX_GRID_YZ:
            raise ValueError(
                f"q: expected at most {MAX_GRID_YZ} requests with a batch-invariant plan, got {b}"
            )
        refuse_what_is_no_plan(rows)
        views = (
            READERS[type(rows)](rows, "tile_scheduler_metadata"),
            READERS[type(num_splits)](num_splits, "num_splits"),
        )
        arrays = _check_arrays(*views, b, device, framework, "q")
        found = ResolvedPlan(arrays, arrays.num_parts, is_object, enable_batch_invariant, None)
        kept = found._replace(arrays=arrays._replace(owners=()))
        _latest_plan.keep(rows, num_splits, place, views, kept)
    return found if unmarked is None else found._replace(unmarked=unmarked)


def is_plan_object(given: Any) -> TypeGuard[FlashMLASchedMeta]:
    """Whether this is a `FlashMLASchedMeta` or another library's object with the same fields."""
    if isinstance(given, FlashMLASchedMeta):
        return True
    return not isinstance(given, type) and all(hasattr(given, name) for name in _PLAN_FIELDS)


def is_empty(plan: FlashMLASchedMeta) -> bool:
    return plan.tile_scheduler_metadata is None and plan.num_splits is None


def refuse_what_is_no_plan(given: Any) -> None:
    """Raise for what callers pass by mistake in place of a plan; arrays are checked elsewhere."""
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


def _empty_plan(
    plan: FlashMLASchedMeta, config: SchedConfig, batch_invariant: bool, place: BatchPlace
) -> ResolvedPlan:
    """The plan of a call that is to compute its arrays; the kernel for that is loaded."""
    if plan.num_splits is not None:
        raise ValueError(
            "tile_scheduler_metadata: expected both arrays of the FlashMLASchedMeta or none, got num_splits"
        )
    if config.b > mla_metadata.MAX_BATCH:
        raise ValueError(f"q: expected at most {mla_metadata.MAX_BATCH} requests for a plan, got {config.b}")
    _, device, framework = place
    num_parts = _num_parts(device, config.s_q, config.h_q, config.h_k, config.topk is not None)
    if config.b:
        mla_metadata.load(config.b, device, framework.capture_query(device))
    return ResolvedPlan(None, num_parts, True, batch_invariant, plan)


def compute_plan(
    plan: ResolvedPlan, b: int, tokens: mla_metadata.TokenCounts, device: int, framework: Framework
) -> PlanArrays:
    """Make the arrays of an empty object and enqueue their computation. The object is not changed yet."""
    rows, num_splits = _empty_arrays(framework, plan.num_parts, b, device)
    arrays = PlanArrays(
        framework.pointer(rows), framework.pointer(num_splits), plan.num_parts, (rows, num_splits)
    )
    mla_metadata.launch(
        device=device,
        stream=framework.current_stream(device),
        capturing=framework.capture_query(device),
        tokens=tokens,
        b=b,
        num_parts=plan.num_parts,
        sched_meta=arrays.sched_meta,
        num_splits=arrays.num_splits,
        splits_length=b + 1,
        object_layout=True,
        batch_invariant=plan.batch_invariant,
    )
    return arrays


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
    """The two arrays that `flash_mla_with_kvcache` makes for an empty object, in a call of these arguments.

    Dense calls give ``cache_seqlens``, sparse ones ``indices``, of which only the shapes count.
    """
    of_vectors = ("cache_seqlens", "topk_length", "extra_topk_length")
    vectors = tuple(map(read_given, (cache_seqlens, topk_length, extra_topk_length), of_vectors))
    of_selections = ("indices", "extra_indices_in_kvcache")
    selections = tuple(map(read_given, (indices, extra_indices_in_kvcache), of_selections))
    given = vectors[0] if selections[0] is None else selections[0]
    assert given is not None
    _, (b, *_), _, _, device, framework, _ = given
    for name, view in zip(of_vectors, vectors, strict=True):
        if view is not None:
            checks.check_vector(name, view, ("int32",), b, "a number of each request")
    lengths, *limits = map(address_of, vectors)
    tokens, topk = mla_metadata.TokenCounts(lengths), None
    if indices is not None:
        widths = [0 if view is None else view[1][2] for view in selections]
        tokens, topk = mla_metadata.TokenCounts(*limits, *widths), widths[0]
    config = SchedConfig(b, s_q, h_q, BLOCK_TOKENS, num_heads_k, causal=False, topk=topk)
    place = BatchPlace(b, device, framework)
    plan = _empty_plan(FlashMLASchedMeta(), config, enable_batch_invariant, place)
    if b:
        rows, num_splits = compute_plan(plan, b, tokens, device, framework).owners
    else:
        rows, num_splits = _empty_arrays(framework, plan.num_parts, b, device)
        framework.fill(rows, -1)  # idle, as in `get_mla_metadata`
        framework.fill(num_splits, 0)
    return rows, num_splits


def mark_plan(plan: ResolvedPlan, configs: PlanConfigs, arrays: PlanArrays) -> None:
    """Note in the object that a call has used it: the configuration, and the arrays computed for it.

    Called last, so that a call that fails leaves the object as it was.
    """
    unmarked = plan.unmarked
    assert unmarked is not None
    if plan.arrays is None:
        unmarked.tile_scheduler_metadata, unmarked.num_splits = arrays.owners
    unmarked.config = config_for(unmarked, configs.invariant if plan.batch_invariant else configs.plain)
    unmarked.have_initialized = True


def config_for(plan: FlashMLASchedMeta, config: SchedConfig) -> Any:
    """A copy of `config`; in the class that an object of another library has for it, if it has our fields."""
    made = replace(config)
    wanted = getattr(type(plan), "Config", SchedConfig)
    if wanted is SchedConfig or not is_dataclass(wanted):
        return made
    names = [field.name for field in fields(wanted)]
    if not set(names) <= set(_CONFIG_FIELDS):
        return made
    return wanted(**{name: getattr(made, name) for name in names})


def check_config(planned: Any, configs: PlanConfigs, batch_invariant: bool) -> None:
    """The call must be the one that an object was filled for; the config may be of the caller's class."""
    wanted = configs.invariant_fields if batch_invariant else configs.plain_fields
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
                f"tile_scheduler_metadata: expected a plan for {field} = {needed}, that of this call, got a "
                f"FlashMLASchedMeta filled for {field} = {given}; take one from get_mla_metadata() for each "
                "configuration"
            )


def _check_arrays(
    rows: Fields,
    num_splits: Fields,
    b: int,
    device: int,
    framework: Framework,
    reference: str,
    names: tuple[str, str] = ("tile_scheduler_metadata", "num_splits"),
) -> PlanArrays:
    """Check the two arrays of a plan for `b` requests."""
    ptr, shape, strides, dtype, _, _, rows_owner = rows
    if dtype != "int32":
        raise TypeError(f"{names[0]}: expected dtype int32, got {dtype}")
    if len(shape) != 2 or shape[1] != mla_metadata.PLAN_COLUMNS or not 0 < shape[0] <= MAX_GRID_YZ:
        raise ValueError(
            f"{names[0]}: expected shape [num_sm_parts, {mla_metadata.PLAN_COLUMNS}] with 1 to {MAX_GRID_YZ} "
            f"rows, got {list(shape)}"
        )
    if strides[1] != 1 or strides[0] != mla_metadata.PLAN_COLUMNS and shape[0] > 1 or ptr & 15:
        raise ValueError(
            f"{names[0]}: expected a contiguous array at a 16-byte aligned address, got strides "
            f"{list(strides)} (elements), address {ptr:#x}"
        )
    num_parts = shape[0]
    splits_ptr, shape, strides, dtype, _, _, splits_owner = num_splits
    if dtype != "int32":
        raise TypeError(f"{names[1]}: expected dtype int32, got {dtype}")
    if len(shape) != 1 or not b < shape[0] <= checks.INT32_MAX:
        raise ValueError(f"{names[1]}: expected shape [n] with n >= b + 1 = {b + 1}, got {list(shape)}")
    if strides[0] != 1 and b > 0:
        raise ValueError(f"{names[1]}: expected a contiguous array, got stride {strides[0]} (elements)")
    checks.check_place(names[0], rows, device, framework, reference)
    checks.check_place(names[1], num_splits, device, framework, reference)
    return PlanArrays(ptr, splits_ptr, num_parts, (rows_owner, splits_owner))


def _num_parts(device: int, s_q: int, h_q: int, h_kv: int, is_sparse: bool) -> int:
    """Rows of a new plan: as many as fill the GPU."""
    sm_count = jit.device_info(device).sm_count
    if is_sparse:
        return mla_metadata.num_sm_parts_sparse(sm_count, s_q, h_q)
    return mla_metadata.num_sm_parts(sm_count, s_q, h_q, h_kv)


def _empty_arrays(framework: Framework, num_parts: int, b: int, device: int) -> tuple[Any, Any]:
    """The two arrays of a plan, not yet computed."""
    return (
        framework.empty((num_parts, mla_metadata.PLAN_COLUMNS), "int32", device),
        framework.empty((b + 1,), "int32", device),
    )


def given_arrays(out: Any) -> tuple[Any, Any]:
    """The two arrays of a plan to recompute in place."""
    if is_plan_object(out):
        if out.tile_scheduler_metadata is None or out.num_splits is None:
            raise ValueError("out: expected a FlashMLASchedMeta with both arrays or none, got one array")
        return out.tile_scheduler_metadata, out.num_splits
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        "out: expected a pair (tile_scheduler_metadata, num_splits) or a FlashMLASchedMeta, "
        f"got {type(out).__name__}"
    )


def batch_invariant_of(plan: FlashMLASchedMeta, asked: bool) -> bool:
    """Whether to recompute `plan` batch-invariant: as the decode calls that use it expect it."""
    if plan.config is None:
        if asked and not (hasattr(plan, "enable_batch_invariant") or hasattr(plan, "__dict__")):
            raise ValueError(
                f"enable_batch_invariant: expected False with a {type(plan).__name__} as out, which has no "
                "place for it, got True; take a rawmla.FlashMLASchedMeta"
            )
        return asked or getattr(plan, "enable_batch_invariant", False)
    planned = getattr(plan.config, "enable_batch_invariant", False)
    if asked and not planned:
        raise ValueError(
            "enable_batch_invariant: expected False, that of the decode call which filled out, got True"
        )
    return planned


def note_batch_invariant(plan: FlashMLASchedMeta, batch_invariant: bool) -> None:
    """Say in an object that no call has used what its arrays are now: calls size their scratch by it."""
    if plan.config is None and getattr(plan, "enable_batch_invariant", False) != batch_invariant:
        plan.enable_batch_invariant = batch_invariant


def check_topk_of(plan: FlashMLASchedMeta, topk: int | None) -> None:
    """A plan recomputed in place must cover the blocks of the decode calls that use it."""
    if plan.config is None:
        return
    if plan.config.topk is None:
        planned, same = "None", topk is None
    else:
        widths = (plan.config.topk, plan.config.extra_topk or 0)
        blocks = sum([ceil_div(width, BLOCK_TOKENS) for width in widths])
        planned = f"an int of {blocks} blocks of {BLOCK_TOKENS}, such as {blocks * BLOCK_TOKENS}"
        same = topk is not None and ceil_div(topk, BLOCK_TOKENS) == blocks
    if not same:
        raise ValueError(f"topk: expected {planned}, that of the decode call which filled out, got {topk}")
