"""The families of cases: an entry has the names of a family's cases, and how they are measured."""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from . import around, dense, flex, kvcache, measure, mla, prefix
from .cases import Case, Row
from .measure import IN_TURNS

KINDS: tuple[type[Case], ...] = (
    *(mla.DecodeCase, mla.SparseCase, mla.PrefillCase, mla.MetadataCase),
    *(dense.DenseCase, dense.DenseBackwardCase, kvcache.KvCacheCase, prefix.PrefixCase),
    *(flex.FlexCase, flex.FlexBackwardCase, flex.BlockMaskCase),
    *(around.CacheCase, around.ConvertCase, around.MergeCase),
)


def expanded(names: str) -> Iterator[str]:
    """The names of a text, in which braces hold alternatives, as in a shell."""
    for name in names.split():
        parts = re.split("{([^}]*)}", name)
        choices = (part.split(",") if at % 2 else [part] for at, part in enumerate(parts))
        yield from map("".join, itertools.product(*choices))


def named(name: str) -> Case:
    """The case of this name."""
    return next(case for kind in KINDS if (case := kind.named(name)) is not None)


@dataclass(frozen=True)
class Family:
    """A family of cases. `measure` takes a case, rounds, replays and the seconds of load. `small` is a case
    for machines without a GPU: the words after `python -m tests.emulator`. It is empty for plans, which the
    small case of decoding makes.
    """

    name: str
    small: str
    names: str
    rounds: int = 1
    measure: Callable[..., Row] = measure.time_attention

    @property
    def title(self) -> str:
        """The name as a heading."""
        return self.name[0].upper() + self.name[1:]


SMALL = "b=1 s_q=200 s_k=300 h_q=2 h_kv=1"

FAMILIES = (
    Family(
        "dense decoding, MLA",
        "dense_decode b=2 s_q=2 s_k=300 h_q=16 causal=True",
        """
        decode-b128-{q1-k4096-h128,q2-k4096-h128-causal,q1-k8192-h128,q2-k8192-h128}-bf16-varlen
        decode-b128-{q2-k8192-h128-causal,q1-k16384-h128,q2-k16384-h128-causal}-bf16-varlen
        decode-b128-{q1-k32768-h128-bf16,q2-k32768-h128-causal-bf16,q2-k8192-h128-causal-fp16}-varlen
        decode-{b128-q1-k8192-h16,b128-q1-k8192-h64,b64-q1-k4096-h16}-bf16-varlen
        decode-b128-{q1-k4096-h128,q1-k8192-h128,q2-k8192-h128-causal,q1-k8192-h64,q1-k8192-h16}-bf16-fixed
        decode-b128-q1-k8192-h8-bf16-fixed
        decode-{b64-q1-k4096-h16,b32-q4-k4096-h16-causal,b16-q1-k4096-h128}-bf16-fixed
        decode-{b16-q2-k4096-h128-causal,b16-q1-k4096-h16,b4-q1-k8192-h128}-bf16-fixed
        decode-b1-q1-{k8192-h128,k32768-h128,k131072-h128,k8192-h16,k131072-h16}-bf16-fixed
        decode-b128-q1-{k4096-h128,k8192-h16}-bf16-varlen-invariant
        decode-{b16-q1-k4096,b1-q1-k8192}-h128-bf16-fixed-invariant
        """,
    ),
    # 8 to 32 heads are what a GPU has under tensor parallelism.
    Family(
        "sparse decoding, V3.2 cache",
        "sparse_decode b=2 s_k=200 h_q=64 topk=140 layout=v32",
        """
        sparse-v32-b{2,16,64,74,128}-q2-k32768-h128-top2048
        sparse-v32-b128-q1-k32768-h{128,64,32,16,8}-top2048
        sparse-v32-b1-q1-k32768-h{128,16}-top2048
        sparse-v32-b148-q2-k32768-h{128,64}-top16384
        sparse-v32-{b128-q2-k32768-h128,b128-q1-k32768-h16,b2-q2-k32768-h128}-top2048-invariant
        """,
    ),
    Family(
        "sparse decoding, V4 cache",
        "sparse_decode b=2 s_k=200 h_q=64 topk=140 layout=model1",
        """
        sparse-model1-b{2,64,128,256}-q2-k16384-h64-top128-extra512page64
        sparse-model1-b{2,64,128,256}-q2-k16384-h128-top128-extra1024page64
        sparse-model1-b{2,64,128,256}-q2-k16384-h64-top128-extra1024page2-lengths
        sparse-model1-b{2,64,128,256}-q2-k16384-h128-top128-extra1024page2-lengths
        """,
    ),
    Family(
        "sparse decoding, bf16 cache",
        "sparse_decode b=2 s_k=200 h_q=64 topk=140 layout=bf16",
        """
        sparse-bf16d576-{b2-q2,b64-q2,b128-q2,b128-q1}-k32768-h128-top2048
        sparse-bf16d512-b128-q1-k32768-h128-top2048
        """,
    ),
    Family(
        "sparse prefill, MLA",
        "sparse_prefill b=5 s_k=200 h_q=64 topk=140 layout=bf16 page_block_size=1 shared=True",
        """
        prefill-bf16d576-q4096-kv{8192,32768,131072}-h128-top2048
        prefill-bf16d512-q4096-kv{8192,65536}-h64-top512
        prefill-bf16d512-q4096-kv{8192,65536}-h128-top1024
        prefill-bf16d576-q{1,64,512}-kv8192-h128-top2048
        prefill-bf16d576-q4096-kv8192-h{64,16,8}-top2048
        prefill-bf16d576-q4096-kv32768-h128-top512
        prefill-v32-q{4096,64}-kv8192-h128-top2048
        prefill-bf16d576-q{1,64,4096}-kv8192-h128-top2048-invariant
        prefill-bf16d576-q4096-kv8192-h16-top2048-invariant
        """,
    ),
    Family(
        "dense attention",
        f"mha {SMALL} d_qk=128 d_v=128 causal=True",
        """
        mha-b2-s8192-h16-d128-{causal-,}bf16-fixed
        mha-{b1-s16384,b8-s2048,b32-s512}-h16-d128-causal-bf16-fixed
        mha-b2-s8192-{h16kv2-d128-causal,h16-d192v128-causal,h16-d192v128}-bf16-fixed
        mha-b2-s8192-{h16kv2-d192v128-causal,h16-d64-causal,h16-d64,h16-d96-causal}-bf16-fixed
        mha-b2-s8192-h8-d256-{causal-,}bf16-fixed
        mha-b2-s8192-h16-d128-causal-{fp16,softcap30-bf16,sink-bf16,window1024-bf16}-fixed
        mha-b2-s8192-h16-d128-{causal-,}bf16-varlen
        mha-{b8-s2048,b32-s512}-h16-d128-causal-bf16-varlen
        """,
        IN_TURNS,
    ),
    Family(
        "decoding over caches",
        "kvcache lengths=(300,77) h_q=4 new=1 rotary=1.0 causal=True",
        """
        kvcache-b1-q1-{k1024,k8192,k32768}-h32kv8-d128-bf16-page16
        kvcache-{b8-q1-k1024,b8-q1-k4096,b8-q1-k16384,b32-q1-k4096,b64-q1-k8192}-h32kv8-d128-bf16-page16
        kvcache-b32-q1-k4096-{h64kv8-d128,h28kv4-d128,h32kv32-d128,h64kv8-d64,h16kv8-d256}-bf16-page16
        kvcache-b32-q1-k4096-h32kv8-d128-bf16-{page1,page64,page256,contiguous,page16-ragged}
        kvcache-b32-{q4,q8}-k4096-h32kv8-d128-bf16-page16
        kvcache-{b8-q1-k16384,b32-q1-k4096}-h32kv8-d128-fp8-page16
        kvcache-{b32-q1-k4096,b1-q1-k1024}-h32kv8-d128-bf16-page16-append
        kvcache-{b1-q2048-k8192,b1-q2048-k32768,b4-q512-k4096}-h32kv8-d128-bf16-page16-segments
        kvcache-b72-q1-k4096-h32kv8-d128-bf16-page16-first8q512
        """,
        IN_TURNS,
    ),
    Family(
        "prefix prefill",
        "prefix query_lengths=(5,100) contexts=(30,200)",
        """
        prefix-b8-q1024-ctx8192-h32kv8-d128-{bf16page16,fp8page16,bf16page16-window1024}
        prefix-{b32-q128-ctx4096,b4-q4096-ctx0,b1-q2048-ctx32768}-h32kv8-d128-bf16page16
        prefix-b8-q1024-ctx8192-h32kv8-{d128-bf16page32,d128-bf16page544,d64-bf16page16,d256-bf16page16}
        prefix-b8-q1024-ctx8192-h32kv8-d128-bf16page16-{alibi,sink,fp8out,ragged}
        """,
    ),
    Family(
        "flex attention",
        f"flex {SMALL} mask=causal score=softcap",
        """
        flex-b2-s8192-{h16-d128-full,h16-d128-causal,h16kv2-d128-causal,h16-d128-window1024}
        flex-b2-s8192-h16-{d128-causal-alibi,d128-causal-softcap,d128-documents900,d64-causal}
        flex-b2-s8192-h16-d128-{causal-bias,prefix2048,causal-cuda,causal-block64,causal-lse-max}
        flex-b32-q1-k4096-h32kv8-d128-{causal,causal-alibi}
        """,
        IN_TURNS,
    ),
    Family(
        "dense attention backward",
        f"mha_backward {SMALL} d_qk=128 d_v=128 causal=True",
        """
        mha-backward-b2-s8192-h16-d128-{causal-,}bf16-fixed
        mha-backward-{b1-s16384,b8-s2048}-h16-d128-causal-bf16-fixed
        mha-backward-b2-s8192-{h16kv2-d128-causal,h16-d192v128-causal,h16-d192v128}-bf16-fixed
        mha-backward-b2-s8192-{h16kv2-d192v128,h16-d64,h16-d96,h8-d256}-causal-bf16-fixed
        mha-backward-b2-s8192-h16-d128-causal-{fp16,softcap30-bf16,sink-bf16,window1024-bf16}-fixed
        mha-backward-b2-s8192-h16-d128-causal-bf16-varlen
        """,
        IN_TURNS,
    ),
    Family(
        "flex attention backward",
        f"flex_backward {SMALL} mask=causal 'score=head scale'",
        """
        flex-backward-b2-s8192-{h16-d128-full,h16-d128-causal,h16kv2-d128-causal,h16-d128-window1024}
        flex-backward-b2-s8192-h16-{d128-causal-alibi,d128-causal-softcap,d128-documents900,d64-causal}
        flex-backward-b2-s8192-h16-d128-causal-{bias,bias-captured,scale-captured,scalar-captured}
        """,
        IN_TURNS,
    ),
    Family(
        "block masks",
        "block_mask b=1 s_q=300 s_k=300 h_q=1 h_kv=1 mask=causal",
        "flex-block-mask-causal-s8192",
        measure=measure.time_moving,
    ),
    Family("plan of a decoding step", "", "metadata-b{1,32,128,512,1024,4096}", measure=mla.time_metadata),
    # A whole prefill's tokens, a decode step's, and what goes with them.
    Family(
        "around decoding",
        "cache kind=v32 n=64",
        """
        cache-{quantize,dequantize}-v32-t65536-b1 cache-write-v32-t{65536,128}-b1
        cache-gather-v32-t65536-b{1,16,1024}
        cache-{quantize,dequantize}-model1-t65536-b1 cache-write-model1-t{65536,128}-b1
        cache-gather-model1-t65536-b{1,16,1024}
        cache-write-bf16-576-t{65536,128}-b1 cache-gather-bf16-576-t65536-b{1,16,1024}
        cache-write-bf16-512-t{65536,128}-b1 cache-gather-bf16-512-t65536-b{1,16,1024}
        convert-{r1-k2048,r128-k2048,r4096-k2048,r16384-k64}
        convert-{r1-k2048,r128-k2048,r4096-k2048,r16384-k64}-compact
        merge-p{2,8,32}-b{1,128}-h128-bfloat16 merge-p8-b128-h128-float32
        """,
        measure=measure.time_moving,
    ),
)


@cache
def table() -> dict[str, tuple[Family, Case]]:
    """Family and case by the name of the case, in the order of the tables."""
    return {name: (family, named(name)) for family in FAMILIES for name in expanded(family.names)}


def family_of(case_id: str) -> Family:
    """The family of the case of this name."""
    return table()[case_id][0]


def select(pattern: str | None) -> list[Case]:
    """The cases whose name contains a match of the regular expression; all of them without one.

    Raises ValueError when it is no regular expression and when nothing matches, so that a typing error cannot
    pass for an empty run.
    """
    try:
        chosen = [case for _, case in table().values() if re.search(pattern or "", case.id)]
    except re.error as error:
        raise ValueError(f"expected a regular expression, got {pattern!r} ({error})") from None
    if not chosen:
        raise ValueError(f"no case matches {pattern!r} (--list prints their names)")
    return chosen
