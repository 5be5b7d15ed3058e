"""The parts of FlashAttention-3 that are there, in the form of its module `flash_attn_config`.

Missing are FP8 without a cache, and values of 512 columns, which come with `qv`: LMDeploy chooses its
attention for MLA by the flag HDIMDIFF64.
"""

from __future__ import annotations

__all__ = ["CONFIG", "show"]

_PARTS = (
    "BACKWARD SPLIT PAGEDKV APPENDKV LOCAL SOFTCAP PACKGQA FP16 FP8 VARLEN CLUSTER HDIM64 HDIM96 HDIM128 "
    "HDIM192 HDIM256 SM8x"
)
CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{part}": part in ("FP8", "SM8x") for part in _PARTS.split()},
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": True,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}


def show() -> None:
    """Print `CONFIG`."""
    from pprint import pprint

    pprint(CONFIG)
