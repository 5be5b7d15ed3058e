"""The table of operations on the emulated device: small calls that reach every role and path of the kernels,
held against their references, in several schedules. What one kernel needs besides is below the suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from full_cases import full_unless  # noqa: E402
from gpu_support import forced_clusters, forget_prepared_calls, united_selections  # noqa: E402

import rawmla  # noqa: E402
from kit import SparseCase  # noqa: E402
from kit.mha import MhaCase, make_mha_inputs  # noqa: E402
from kit.prefix import PrefixCase  # noqa: E402
from operations import OPERATIONS, Operation  # noqa: E402
from operations.dense import dense_call  # noqa: E402
from operations.memory import Outputs  # noqa: E402
from operations.mla_prefill import BF16, make_prefill_call  # noqa: E402
from operations.prefix import WITHOUT_OWN, make_prefix_call  # noqa: E402

if TYPE_CHECKING:
    from emulator import Emulator


def names(labels: Sequence[str]) -> set[str]:
    """Names of the kernels with these labels."""
    return {label.partition("[")[0] for label in labels}


def check(emulator: Emulator, operation: Operation, case: Any) -> None:
    """Make the call of a case, with outputs between canaries where it takes some."""
    call = operation.make(case, "cpu")
    if operation.out is None:
        call.check(call.run())
        return
    with mock.patch.object(emulator, "run", lambda *arguments: None):
        results = call.run()  # for their shapes
    forget_prepared_calls()
    outputs = Outputs.of(operation, call, results)
    call.check(call.run(**outputs.given))
    outputs.assert_untouched_around()


@pytest.mark.parametrize("operation", OPERATIONS, ids=[operation.name for operation in OPERATIONS])
def test_small_calls(emulator: Emulator, operation: Operation) -> None:
    emulator.sm_count = 8
    with forced_clusters() if operation.clusters else nullcontext():
        for case in operation.small_cases or operation.cases:
            try:
                check(emulator, operation, case)
            except AssertionError as error:
                raise AssertionError(f"{case.id}: {error}") from error
    assert names(emulator.launched) == set(operation.kernels)


RACES = [(operation, case) for operation in OPERATIONS for case in operation.race_cases]


@pytest.mark.parametrize("seeds", full_unless(lambda seeds: 2 in seeds, ((2, 3), (4, 5))), ids=str)
@pytest.mark.parametrize(
    ("operation", "case"), RACES, ids=[f"{operation.name}-{case.id}" for operation, case in RACES]
)
def test_other_schedules(emulator: Emulator, operation: Operation, case: Any, seeds: tuple[int, ...]) -> None:
    with forced_clusters() if operation.clusters else nullcontext():
        for emulator.seed in seeds:
            check(emulator, operation, case)


# ---- dense attention and prefix prefill


@pytest.mark.parametrize("more", ({}, {"d_qk": 64, "d_v": 64}), ids=("d 128", "d 64"))
def test_references_rise(emulator: Emulator, more: dict[str, Any]) -> None:
    """Scores grow from key to key, to many times what the first block has."""
    inputs = make_mha_inputs(MhaCase(b=1, s_q=600, s_k=1100, h_q=1, h_kv=1, **more), "cpu")
    inputs.q.mul_(4)
    inputs.k.mul_(torch.linspace(0.1, 3, 1100).bfloat16()[:, None, None])
    call = dense_call(inputs)
    call.check(call.run())


def test_turns_without_own_keys(emulator: Emulator) -> None:
    """Lanes of the loader that look for its turn late, when the gatherer has taken the next one: these seeds
    delay them.
    """
    for emulator.seed in (8, 21, 24):
        emulator.launched.clear()  # their number decides the order, too
        call = make_prefix_call(PrefixCase(**WITHOUT_OWN, x=16, h_q=1, h_kv=1), "cpu")
        call.check(call.run())


# ---- MLA


def test_united_selections(emulator: Emulator) -> None:
    case = SparseCase(b=13, h_q=16, s_k=41, topk=70, duplicates=0.3, lengths="random", sink=True, **BF16)
    with united_selections(scratch_bytes=1 << 15, tokens=1):
        call = make_prefill_call(case, "cpu")
        call.check(call.run())
    assert {"mla_unite_selections", "mla_find_not_finite"} <= names(emulator.launched)


# ---- flex attention: lists that a user wrote


@pytest.mark.parametrize("form", ("both lists", "by columns"))
def test_a_block_named_twice_ends(emulator: Emulator, form: str) -> None:
    """In a fixed order a tile waits until others have added: a list of the user's may count them wrong."""
    n = 384
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    counts = torch.tensor([[[1, 1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    if form == "both lists":
        lists = {"full_kv_num_blocks": counts, "full_kv_indices": indices}
        mask = rawmla.BlockMask.from_kv_blocks(counts, indices, **lists, seq_lengths=(n, n))
    else:
        q_counts = torch.tensor([[[3, 1, 1]]], dtype=torch.int32)
        q_indices = torch.tensor([[[[0, 0, 1], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
        mask = rawmla.BlockMask((n, n), counts, indices, q_num_blocks=q_counts, q_indices=q_indices)
    out, lse = rawmla.flex_attention(q, k, v, None, mask, return_lse=True)
    gradients = rawmla.flex_attention_backward(dout, q, k, v, out, lse, None, mask, deterministic=True)
    assert all(x.isfinite().all() for x in gradients[:3])


def test_keys_that_no_block_lists(emulator: Emulator) -> None:
    """A tile of them waits for its copies before it ends: the next CTA has the same shared memory."""
    n = 512
    q, k, v, dout = torch.randn(4, 1, 1, n, 32).half()
    counts, indices = torch.ones(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, 4, 4, dtype=torch.int32)
    mask = rawmla.BlockMask.from_kv_blocks(counts, indices, seq_lengths=(n, n))
    for emulator.seed in range(2, 8):
        out, lse = rawmla.flex_attention(q, k, v, None, mask, return_lse=True)
        _, dk, dv, *_ = rawmla.flex_attention_backward(dout, q, k, v, out, lse, None, mask)
        for gradient in (dk, dv):
            assert gradient[..., :128, :].any() and not gradient[..., 128:, :].any()
