"""Loading kernels ahead of their first use."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import rawmla

from . import jit
from .api import dense, flex
from .call.arguments import SECOND_NAMES
from .call.arrays import READERS, is_array
from .call.checks import as_bool
from .call.frameworks import Fields, Framework
from .flex import backward as flex_backward
from .flex import create
from .flex.block_lists import LISTS, Q_LISTS
from .flex.block_mask import lacks_columns
from .flex.functions import as_reading
from .flex.lists import MASK_PARTS
from .kernels.mha_backward_variants import ALL, Needs
from .kernels.operations import specs_of
from .mha import backward as mha_backward
from .mha import forward as mha_forward
from .mha.records import DenseArrays, Gradients, Packing, options_of
from .mla.plan import is_plan_object
from .stand_ins import Described, NoFramework, StandIn


def warmup(
    *operations: str,
    dtypes: Iterable[str] | None = None,
    d_qk: Iterable[int] | None = None,
    page_block_sizes: Iterable[int] | None = None,
    sparse_formats: Iterable[str] | None = None,
    prefill_formats: Iterable[str] | None = None,
    mha_head_dims: Iterable[tuple[int, int]] | None = None,
    mha_backward_head_dims: Iterable[tuple[int, int]] | None = None,
    prefix_head_dims: Iterable[int] | None = None,
    kvcache_head_dims: Iterable[tuple[int, int]] | None = None,
    device: int | None = None,
) -> None:
    """Compile kernels ahead of time, or take them from the disk cache, and load them.

    A CUDA-graph capture cannot compile or load anything: before it, call this, or once the function that is
    to be captured.

    Parameters
    ----------
    *operations : str
        What to load the kernels of: "dense_decode", "sparse_decode", "sparse_prefill", "cache" (writing,
        reading, quantising), "indices" (`convert_indices`), "merge" (`merge_attn_states`), "metadata"
        (`get_mla_metadata`), "mha" (`flash_attn_func` and its varlen forms), "mha_backward" (their
        gradients), "prefix" (`context_attention_fwd`), "kvcache" (`flash_attn_with_kvcache`), "flex" (lists
        of block masks; `warmup_call` loads the kernels of `flex_attention` and `create_block_mask`, of which
        functions are a part). None named: all of them, as far as the options below select any.
    dtypes : iterable of str, optional
        dtypes of q and the cache in dense decoding, of what is merged, of the arrays of MHA, and of q in
        prefix prefill: "bfloat16", "float16". None: "bfloat16".
    d_qk : iterable of int, optional
        576, 512, for dense decoding. None: 576.
    page_block_sizes : iterable of int, optional
        Tokens per page of the caches that dense decoding will read. None: 64, whose kernels serve every
        multiple of 64.
    sparse_formats : iterable of str, optional
        Formats of the caches that sparse decoding will read, and that will be written or gathered: "v32",
        "model1", "bf16". None: all of them if an operation is named, else none.
    prefill_formats : iterable of str, optional
        Formats of what `flash_mla_sparse_fwd` will read, the same names ("bf16" is a plain kv). None: as for
        `sparse_formats`.
    mha_head_dims : iterable of pairs of int, optional
        Head dimensions (d_qk, d_v) of MHA, each 1 to 256; `warmup_call` loads what a softcap or slopes need.
        The kernels of "flex" are the same for all pairs. Without a pair there are none.
        None: (64, 64), (96, 96), (128, 128), (192, 128) and (256, 256) if "mha" or "flex" is named, else
        none.
    mha_backward_head_dims : iterable of pairs of int, optional
        The same of the backward of MHA, for calls in which q, k and v all need gradients; `warmup_call` loads
        what others need. None: the same if "mha_backward" is named, else none.
    prefix_head_dims : iterable of int, optional
        Head dimensions of prefix prefill, each 1 to 256, over caches in vLLM's layout with blocks of a
        multiple of 16 tokens or over e4m3 caches; `warmup_call` loads what other caches, slopes or FP8
        output need. None: 64 and 128 if "prefix" is named, else none.
    kvcache_head_dims : iterable of pairs of int, optional
        Head dimensions (d_qk, d_v) of attention over caches, for any number of query tokens; `warmup_call`
        loads what a softcap, slopes or FP8 caches need. None: the pairs of `mha_head_dims` if "kvcache" is
        named, else none.
    device : int, optional
        Device ordinal; None is the current device.

    Raises
    ------
    TypeError
        An option is no iterable, or a value in it is of the wrong kind.
    ValueError
        An unknown operation, dtype, d_qk, page size, format or head dimension, or an option that no operation
        named has.
    RawMLAError
        A subclass says what is missing: GPU, driver, NVRTC, CuPy.

    Notes
    -----
    Arguments are checked before a device is looked for. Blocks until everything is loaded (seconds for a cold
    cache); enqueues nothing.

    Examples
    --------
    >>> rawmla.warmup(sparse_formats=["v32"])
    >>> rawmla.warmup("sparse_prefill", prefill_formats=["bf16"])
    >>> rawmla.warmup("mha", mha_head_dims=[(128, 128)])
    """
    specs = specs_of(
        operations, dtypes=dtypes, d_qk=d_qk, page_block_sizes=page_block_sizes,
        sparse_formats=sparse_formats, prefill_formats=prefill_formats, mha_head_dims=mha_head_dims,
        mha_backward_head_dims=mha_backward_head_dims, prefix_head_dims=prefix_head_dims,
        kvcache_head_dims=kvcache_head_dims,
    )  # fmt: skip
    if device is None:
        device = jit.current_device()
    for spec in specs:
        jit.get_kernel(spec, device)


def warmup_call(function: Callable[..., Any], *args: Any, backward: bool = False, **kwargs: Any) -> None:
    """Compile and load what one call needs: `function(*args, **kwargs)` up to the launch of its kernels.

    Parameters
    ----------
    function : callable
        A function of rawmla that takes arrays, such as `rawmla.flash_mla_with_kvcache`, or
        `rawmla.create_block_mask`.
    *args, **kwargs
        Its arguments. Arrays are looked at as in the call itself, and neither read nor written. A plan object
        is not filled, and no result is given.
    backward : bool
        Also load what the gradients of the call need: gradients of the tensors that require grad, or of
        all where none does.

    Raises
    ------
    TypeError
        `function` is not a public function of rawmla that takes arrays, or backward is no bool.
    ValueError
        backward of a function that has none.
    TypeError, ValueError, RawMLAError
        What the call itself raises, but that arrays of two frameworks may be on different streams.

    Notes
    -----
    Allocates no memory of the GPU and enqueues nothing; blocks until everything is loaded.

    Examples
    --------
    >>> rawmla.warmup_call(rawmla.flash_mla_sparse_fwd, q, kv, indices, 576**-0.5)
    """
    if not any(function is known for known in _functions()):
        raise TypeError(f"function: expected a function of rawmla that takes arrays, got {function!r}")
    if as_bool("backward", backward) and function not in _WITH_BACKWARD:
        raise ValueError(f"backward: expected False, as {function.__name__} has no backward, got True")
    if function is flex.create_block_mask:  # no array tells its framework
        function = _load_block_mask
    stand_ins = [_stand_in(value) for value in args]
    named = {name: _stand_in(value) for name, value in kwargs.items()}
    torch = sys.modules.get("torch") if function in _WITH_BACKWARD else None
    with torch.no_grad() if torch is not None else nullcontext():  # no graph is made of stand-ins
        results = function(*stand_ins, **named)
        if not backward:
            return
        given = inspect.signature(function).bind(*stand_ins, **named)
        given.apply_defaults()
        call = _call_flex_backward if function is flex.flex_attention else _call_dense_backward
        call(given.arguments, results)


_WITH_BACKWARD = (*[getattr(dense, name) for name in dense.__all__], flex.flex_attention)


def _call_dense_backward(given: dict[str, Any], results: tuple[Any, Any]) -> None:
    """The call for the gradients of a call of dense attention with these arguments and results."""
    for second, first in SECOND_NAMES.items():
        if given.get(second) is not None:
            given[first] = given[second]
    get, packing = given.get, None
    q, k, v = wholes = [get("q"), get("k"), get("v")]
    if "qkv" in given:
        q, packing = get("qkv"), Packing("qkv", 3, get("head_dim_qk"))
        wholes = [q] * 3
    elif "kv" in given:
        k, packing = get("kv"), Packing("kv", 2, get("head_dim_qk"))
        wholes = [q, k, k]
    starts, longest = get("cu_seqlens"), get("max_seqlen")
    arrays = DenseArrays(
        q, k, v, get("cu_seqlens_q", starts), get("cu_seqlens_k", starts), get("seqused_q"), get("seqused_k"),
        get("attn_sink"), get("alibi_slopes"), None,
    )  # fmt: skip
    _, views = mha_forward.read(arrays, packing)
    q, k, v = [Described(*view[:6]) for view in views[:3]]
    arrays = arrays._replace(q=q, k=k, v=v)
    lengths = get("max_seqlen_q", longest), get("max_seqlen_k", longest)
    options = options_of(
        0.0, get("softmax_scale"), get("causal"), get("deterministic"), get("is_varlen", True),
        get("window_size"), get("softcap"), 0, lengths if "is_varlen" in given else None,
    )  # fmt: skip
    out, lse = results
    needs = _needs([*wholes, arrays.attn_sink])
    gradients = Gradients(out, out, lse, None, None, None, None)
    mha_backward.backpropagate(arrays, gradients, options, needs)
    if arrays.attn_sink is not None:  # with a gradient of lse it has a kernel of its own
        mha_backward.backpropagate(arrays, gradients._replace(dlse=lse), options, needs)


def _load_block_mask(*args: Any, **kwargs: Any) -> None:
    """Check the arguments of a call of `create_block_mask`, and load its kernels."""
    given = inspect.signature(flex.create_block_mask).bind(*args, **kwargs)
    given.apply_defaults()
    create.prepare(**given.arguments)


def _call_flex_backward(given: dict[str, Any], results: Any) -> None:
    """The call for the gradients of a call of `flex_attention`."""
    out = results[0] if isinstance(results, tuple) else results
    _, shape, _, _, device, framework, _ = READERS[type(out)](out, "out")
    rows = tuple(shape[:-1])
    (lse, _) = framework.allocator([(rows, "float32")], 0, device)()
    query, key, value = [given[name] for name in ("query", "key", "value")]
    score_mod = given.get("score_mod")
    score = as_reading(score_mod, "score_mod", device, backward=True)
    captured: list[Any] = []
    if score is not None and score.frame.mod.backward is not None:
        captures, places = score.frame.mod.captures, score.frame.mod.backward.gradients
        captured = [captures[i]._replace(array=score.arrays[i]) for i in places]
    flex_backward.gradients(
        _needs([query, key, value, *captured]),
        flex_backward.Arrays(query, key, value, out, out, lse, None),
        score_mod,
        given.get("block_mask"),
        flex_backward.Options(given.get("scale"), given.get("enable_gqa", False), given.get("deterministic")),
    )


def _needs(arguments: list[Any]) -> Needs:
    """The gradients of the arguments that hold a tensor which requires grad, or all if none does.

    The first three are q, k and v.
    """
    q, k, v, *others = [getattr(getattr(x, "array", None), "requires_grad", False) for x in arguments]
    needs = Needs(q, k, v, any(others))
    return needs if any(needs) else ALL


def _functions() -> list[Callable[..., Any]]:
    """The public functions that take arrays."""
    public = rawmla._MODULE_OF.items()
    names = [name for name, module in public if module.startswith("api.") and name != "trace_mod"]
    return [getattr(rawmla, name) for name in names]


def _read(x: StandIn, name: str) -> Fields:
    ptr, shape, strides, dtype, device, framework, _ = READERS[type(x.array)](x.array, name)
    return ptr, shape, strides, dtype, device, _framework_of(framework), x


READERS[StandIn] = _read


_MASK = (*LISTS, *Q_LISTS, *MASK_PARTS)
"""The attributes of a BlockMask that calls look at."""


def _stand_in(value: Any) -> Any:
    """Stand for the argument of a call in one that launches nothing."""
    if isinstance(value, list):
        return [_stand_in(one) for one in value]
    if isinstance(value, tuple):
        made = [_stand_in(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)  # AuxRequest has fields
    if is_plan_object(value):
        copied = copy.copy(value)
        copied.tile_scheduler_metadata = _stand_in(value.tile_scheduler_metadata)
        copied.num_splits = _stand_in(value.num_splits)
        return copied
    if hasattr(value, "kv_num_blocks"):  # a BlockMask, also torch's
        parts = {name: getattr(value, name) for name in _MASK if hasattr(value, name)}
        stand_ins = {name: _stand_in(part) for name, part in parts.items()}
        kept = {"_kept": getattr(value, "_kept", None)}  # what the mask read of its function
        columns = _columns_of(value) if lacks_columns(value) else {}
        return SimpleNamespace(**{**stand_ins, **columns, **kept})
    return StandIn(value) if is_array(value) else value


def _columns_of(mask: Any) -> dict[str, Any]:
    """Stand-ins for the lists by columns that a backward makes."""
    *_, device, framework, _ = READERS[type(mask.kv_indices)](mask.kv_indices, "block_mask.kv_indices")
    *leading, rows, _ = mask.kv_indices.shape
    counts = (*leading, -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1]))
    shapes = [counts, (*counts, rows)] * (1 if mask.full_kv_num_blocks is None else 2)
    arrays = _framework_of(framework).allocator([(shape, "int32") for shape in shapes], 0, device)()
    return dict(zip(Q_LISTS, arrays[:-1], strict=False))


_frameworks: dict[Framework, NoFramework] = {}


def _framework_of(framework: Framework) -> NoFramework:
    return _frameworks.get(framework) or _frameworks.setdefault(
        framework,
        NoFramework(framework.name, framework.is_capturing, framework.capture_query, framework.determinism),
    )
