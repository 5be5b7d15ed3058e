"""Errors for operations that FlashMLA has and rawmla does not; they name the argument and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, NoReturn

# Bytes of a cache record -> whose it is, as sgl-flash-mla 1.0.0 and vLLM 0.33 document `k_cache`; what helps.
_OTHER_RECORDS = {
    528: (
        "DeepSeek-V4.1, or V3.2 without RoPE columns",
        "for V4.1 write 584-byte records, as vLLM and SGLang do on Hopper; for a model without RoPE columns "
        "keep the engine's own kernel (unset RAWMLA_SGLANG, or take rawmla off PYTHONPATH)",
    ),
    352: ("NVFP4 of DeepSeek-V3.2", "take the FP8 cache of 656-byte records"),
    288: ("FP4 of DeepSeek-V4.1", "take the FP8 cache of 584-byte records"),
}
_BYTES_OF_FORMAT = {"V32": 656, "V4": 584, "V32_NO_ROPE": 528, "V41": 528}
_BYTE_DTYPES = ("uint8", "int8", "float8_e4m3fn")


def refuse_other_records(name: str, cache: Any) -> None:
    """Raise if the records of a cache are of a kind that FlashMLA reads on some GPU, and rawmla does not."""
    shape = getattr(cache, "shape", None)
    if shape is None or len(shape) != 4 or shape[3] not in _OTHER_RECORDS:
        return
    if str(cache.dtype).removeprefix("torch.") in _BYTE_DTYPES:
        owner, remedy = _OTHER_RECORDS[shape[3]]
        raise NotImplementedError(
            f"{name}: expected records of 656 bytes (V32) or 584 bytes (V4), got {shape[3]} bytes ({owner}), "
            f"for which rawmla has no kernel; {remedy}"
        ) from None


def check_kv_format(kv_format: Any, k_cache: Any) -> None:
    """Check sgl-flash-mla's name of the records of `k_cache` against their size."""
    if kv_format not in _BYTES_OF_FORMAT:
        names = ", ".join(map(repr, _BYTES_OF_FORMAT))
        raise ValueError(f"kv_format: expected None or one of {names}, got {kv_format!r}")
    shape = getattr(k_cache, "shape", None)
    if shape is None:
        return  # the call says what is wrong with it
    width = shape[-1]
    if width != _BYTES_OF_FORMAT[kv_format]:
        raise ValueError(
            f"kv_format: expected None or the name of records of {width} bytes, as k_cache has, got "
            f"{kv_format!r}, whose records have {_BYTES_OF_FORMAT[kv_format]} bytes"
        )
    refuse_other_records("k_cache", k_cache)


def refuse_fp8_q(q: Any, name: str = "q") -> None:
    """Raise for the argument `name`, which means FP8 dense decoding, if q is FP8."""
    if "float8" in str(getattr(q, "dtype", "")):
        raise NotImplementedError(
            f"{name}: expected a bfloat16 or float16 q, got one of {q.dtype}; FP8 dense decoding is not in "
            "rawmla, so decode over a bfloat16 cache (KV-cache dtype auto or bfloat16 in vLLM and SGLang)"
        ) from None


def refuse_descales(q: Any, descale_q: Any, descale_k: Any) -> None:
    """Raise if a scale of FP8 dense decoding is given."""
    for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
        if value is not None:
            refuse_fp8_q(q, name)
            raise ValueError(f"{name}: expected None without an FP8 q, got an array with a q of {q.dtype}")


MEGA_ATTENTION = (
    "normalise and rotate q, call flash_mla_with_kvcache or flash_mla_sparse_fwd, and rotate back and "
    "quantise their out"
)
"""The remedy for a function that fuses norm, rotation and quantisation with attention."""


def refused(
    name: str, remedy: str, required: str | None = None, **defaults: object
) -> Callable[..., NoReturn]:
    """Make a function that raises. It has the name of a function that FlashMLA has for SM100.

    ``required`` has the names of its parameters without default, which ``defaults`` follow; None: it takes
    any arguments.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        signature(refuse).bind(*args, **kwargs)
        raise NotImplementedError(f"{name}: FlashMLA has it for SM100, rawmla does not have it; {remedy}")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    refuse.__doc__ = "NotImplementedError."
    if required is not None:
        values = {**dict.fromkeys(required.split(), Parameter.empty), **defaults}
        parameters = [Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, default=y) for x, y in values.items()]
        refuse.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return refuse
