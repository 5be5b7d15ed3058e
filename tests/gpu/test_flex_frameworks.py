"""Flex attention with torch, CuPy and DLPack; streams, graphs, threads, torch.compile, warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flex_calls import assert_same_results, assert_untouched_around, attend, created_mask, out_buffer
from gpu_support import assert_poison, cupy, loaded_labels, no_kernel_loaded, replaced_launches, torch
from test_frameworks import DELAY_CYCLES, Producer, to_cupy
from test_graphs import capture

import rawmla
from kit.flex import (
    FlexCase,
    FlexInputs,
    attended,
    block_mask_of,
    check_flex,
    make_flex_inputs,
    with_mask_mod,
)

LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
CASES = (
    FlexCase(b=3, s_q=150, s_k=200, score="alibi table", mask="documents"),
    FlexCase(
        h_kv=2, s_q=300, s_k=277, d_qk=128, d_v=64, dtype="float16", score="bias b h q k", mask="window",
        block=(64, 64), layout="slice",
    ),
    FlexCase(s_q=200, s_k=200, layout="tokens"),
    FlexCase(b=3, b_kv=1, s_q=200, s_k=300, mask="random", score="head scale"),
)  # fmt: skip
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def arguments(inputs: FlexInputs, change: Callable[[Any], Any], first: Any = None) -> tuple[Any, Any]:
    """Arrays and keywords of a call whose arrays `change` makes of tensors, functions being CUDA text.

    `first` makes query, key and value instead.
    """

    def changed(function: Any) -> Any:
        captures = {
            name: change(x) if isinstance(x, torch.Tensor) else x for name, x in function.captures.items()
        }
        return rawmla.CudaMod(function.code, captures)

    keywords = inputs.keywords()
    if inputs.score is not None:
        keywords["score_mod"] = changed(inputs.score)
    if inputs.block_mask is not None and inputs.mask is not None:
        lists = [getattr(inputs.block_mask, name) for name in LISTS]
        keywords["block_mask"] = rawmla.BlockMask(
            inputs.block_mask.seq_lengths,
            *[None if x is None else change(x) for x in lists],
            BLOCK_SIZE=inputs.block_mask.BLOCK_SIZE,
            mask_mod=changed(inputs.mask),
        )
    return tuple((first or change)(x) for x in (inputs.q, inputs.k, inputs.v)), keywords


def as_torch(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.from_dlpack(x) for x in results)


def tensors_of(inputs: FlexInputs) -> list[Any]:
    """All that the call reads."""
    found = [inputs.q, inputs.k, inputs.v]
    for function in (inputs.score, inputs.mask):
        if function is not None:
            found += [x for x in function.captures.values() if isinstance(x, torch.Tensor)]
    if inputs.block_mask is not None:
        found += [x for x in (getattr(inputs.block_mask, name) for name in LISTS) if x is not None]
    return found


# ---- arrays


@each
def test_flex_cupy(case: FlexCase) -> None:
    """CuPy arrays in, CuPy arrays out, with the bits that torch gets; `out` too."""
    inputs = make_flex_inputs(case)
    want = attend(inputs, "cuda")
    check_flex(inputs, want)
    buffer, given = out_buffer(inputs)
    torch.cuda.synchronize()
    arrays, keywords = arguments(inputs, to_cupy)
    got = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
    assert all(isinstance(x, cupy.ndarray) for x in got)
    assert [x.strides for x in got] == [tuple(x.element_size() * n for n in x.stride()) for x in want[:2]]
    target = to_cupy(given)
    got_given = rawmla.flex_attention(*arrays, **keywords, return_lse=True, out=target)
    assert got_given[0] is target
    cupy.cuda.get_current_stream().synchronize()
    assert_same_results("CuPy", as_torch(got), want[:2])
    assert_same_results("CuPy, out given", (given, torch.from_dlpack(got_given[1])), want[:2])
    assert_untouched_around(buffer, given)


@each
def test_flex_dlpack_producer(case: FlexCase) -> None:
    """Taken over by CuPy, which then also holds the results."""
    inputs = make_flex_inputs(case)
    want = attend(inputs, "cuda")
    torch.cuda.synchronize()
    arrays, keywords = arguments(inputs, to_cupy, Producer)
    got = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
    assert all(isinstance(x, cupy.ndarray) for x in got)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_results("a producer", as_torch(got), want[:2])


def test_flex_two_frameworks() -> None:
    """Lists and captured arrays of CuPy beside tensors: results are tensors."""
    inputs = make_flex_inputs(CASES[0])
    want = attend(inputs, "cuda")
    _, keywords = arguments(inputs, to_cupy)
    got = rawmla.flex_attention(inputs.q, inputs.k, inputs.v, **keywords, return_lse=True)
    assert all(isinstance(x, torch.Tensor) for x in got)
    assert_same_results("two frameworks", got, want[:2])


def test_flex_results_are_poison_before_the_kernel() -> None:
    """What the other tests rely on."""
    for case in (CASES[0], CASES[2], FlexCase(s_q=70, s_k=90, d_qk=17, d_v=33)):
        inputs = make_flex_inputs(case)
        with replaced_launches(lambda: None):
            for _ in range(2):
                for name, result in zip(("out", "lse", "max"), attend(inputs, max_scores=True), strict=True):
                    assert_poison(name, result)


def test_flex_tensors_that_require_grad() -> None:
    """Without a graph of autograd they are as others."""
    inputs = make_flex_inputs(CASES[0])
    want = attend(inputs)
    for tensor in tensors_of(inputs):
        if tensor.is_floating_point():
            tensor.requires_grad_()
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            got = attend(inputs)
        assert not got[0].requires_grad and not got[1].requires_grad
        assert_same_results(without.__name__, got, want)


# ---- streams


def spoil(inputs: FlexInputs) -> list[tuple[Any, Any]]:
    """Make all arrays garbage that is safe; returns what they held."""
    held = [(x, x.clone()) for x in tensors_of(inputs)]
    for x, _ in held:
        x.fill_(float("nan") if x.is_floating_point() else 0)
    return held


@each
def test_flex_side_stream(case: FlexCase) -> None:
    """The inputs become valid late on a side stream; only work on that stream, after them, sees them."""
    inputs = make_flex_inputs(case)
    want = attend(inputs)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # so that the allocator holds memory for the stream
        for _ in range(2):
            attend(inputs)
    torch.cuda.synchronize()
    held = spoil(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = attend(inputs)
        assert not stream.query(), "the call waited for the device"
        spoil(inputs)
    stream.synchronize()
    assert_same_results("on a side stream", got, want)


def test_flex_cupy_side_stream() -> None:
    inputs = make_flex_inputs(CASES[0])
    want = attend(inputs, "cuda")
    torch.cuda.synchronize()
    arrays, keywords = arguments(inputs, to_cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        rawmla.flex_attention(*arrays, **keywords, return_lse=True)
    stream.synchronize()
    held = spoil(inputs)
    torch.cuda.synchronize()
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(DELAY_CYCLES)
        for x, valid in held:
            x.copy_(valid)
        got = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
        assert not stream.done, "the call waited for the device"
    stream.synchronize()
    assert_same_results("on a side stream", as_torch(got), want[:2])


@each
def test_flex_second_device(case: FlexCase) -> None:
    """The arrays are on a device that is not the current one; and on one while another is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_flex_inputs(case)
    want = attend(inputs, "cuda")
    arrays, keywords = arguments(inputs, lambda x: x.to("cuda:1"))
    torch.cuda.synchronize("cuda:1")
    got = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in got)
    assert_same_results("on the second device", [x.to("cuda:0") for x in got], want[:2])
    with torch.cuda.device(1):
        got = attend(inputs)
        assert torch.cuda.current_device() == 1
    assert_same_results("while the second is current", got, attend(inputs))


@pytest.mark.parametrize("framework", ("torch", "cupy"))
def test_block_mask_on_the_second_device(framework: str) -> None:
    """`to` copies the lists, and leaves the mask what it is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    shift = zero if framework == "torch" else cupy.from_dlpack(zero)
    mask = rawmla.create_block_mask(
        rawmla.CudaMod("q_idx >= kv_idx + shift(0)", {"shift": shift}), None, None, 300, 500
    )
    torch.cuda.synchronize(0)
    moved = mask.to("cuda:1")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
        one, other = getattr(mask, name), getattr(moved, name)
        assert type(other) is type(one)
        if framework == "cupy":
            one, other = torch.from_dlpack(one), torch.from_dlpack(other)
        assert one.device == torch.device("cuda:0") and other.device == torch.device("cuda:1")
        assert bool((other.cpu() == one.cpu()).all()) and one.shape == other.shape
    assert moved.seq_lengths == mask.seq_lengths and moved.mask_mod is mask.mask_mod


# ---- graphs


def list_again(inputs: FlexInputs) -> None:
    """Bring the lists up to date, in place, after tensors that the mask reads changed."""
    assert inputs.mask is not None and inputs.block_mask is not None
    case = inputs.case
    seen = attended(inputs.mask, case, "cuda")
    new = block_mask_of(seen, (case.s_q, case.s_k), case.block, None, separate=case.separate)
    for name in LISTS:
        getattr(inputs.block_mask, name).copy_(getattr(new, name))


@pytest.mark.parametrize("block", ((128, 128), (64, 32)), ids=str)
@pytest.mark.parametrize("form", ("python", "cuda"))
def test_flex_graph(form: str, block: tuple[int, int]) -> None:
    """Replays follow inputs, lists and captured tensors that change in place; also with a mask that is made
    in the graph, and where what has to be copied is copied in it.
    """
    inputs = make_flex_inputs(replace(CASES[0], s_q=400, s_k=500, gap=0.0, block=block))
    assert inputs.mask is not None and inputs.score is not None
    inputs.v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    documents, slopes = inputs.mask.captures["documents"], inputs.score.captures["slopes"]

    def work() -> Any:
        listed = [attend(inputs, form) for _ in range(2)]
        return [*listed, attend(inputs, form, block_mask=created_mask(inputs, form))]

    work()
    buffer, given = out_buffer(inputs)
    attend(inputs, form, out=given)
    graph, (results, with_out) = capture(lambda: (work(), attend(inputs, form, out=given)))
    for turn in range(4):
        graph.replay()
        want = attend(inputs, form)
        check_flex(inputs, want)
        for number, got in enumerate((*results, with_out)):
            assert_same_results(f"replay {turn}, call {number}", got, want)
        inputs.q.mul_(-0.5)
        inputs.v.copy_(inputs.v.flip(-1))
        slopes.mul_(2)
        documents.copy_((documents * (turn + 1) + 1) // 2)
        list_again(inputs)
    assert_untouched_around(buffer, given)


def test_flex_cupy_graph() -> None:
    """Captured on a CuPy stream, with results that live on."""
    inputs = make_flex_inputs(CASES[0])
    want = attend(inputs, "cuda")
    torch.cuda.synchronize()
    arrays, keywords = arguments(inputs, to_cupy)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        # Loads the kernel, and gives the pool memory for this stream.
        rawmla.flex_attention(*arrays, **keywords, return_lse=True)
        stream.synchronize()
        stream.begin_capture()
        try:
            got = rawmla.flex_attention(*arrays, **keywords, return_lse=True)
        finally:
            graph = stream.end_capture()
        for _ in range(2):
            for x in got:
                x.fill(0)
            graph.launch(stream)
        stream.synchronize()
    assert_same_results("replayed", as_torch(got), want[:2])


@pytest.mark.parametrize("block", ((128, 128), (64, 32)), ids=str)
def test_flex_kernel_missing_in_a_capture(block: tuple[int, int]) -> None:
    """Nothing is compiled or loaded in a capture, and the refused call leaves nothing behind."""
    inputs = make_flex_inputs(replace(CASES[0], block=block))
    want = attend(inputs)
    with no_kernel_loaded():
        with (
            pytest.raises(rawmla.KernelNotReadyError, match="warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            attend(inputs)
        assert loaded_labels() == []
        assert_same_results("after a refused capture", attend(inputs), want)
        torch.cuda.synchronize()


@pytest.mark.parametrize("form", ("python", "cuda"))
@each
def test_flex_warmup_call(case: FlexCase, form: str) -> None:
    """Loads what the very call needs, allocates and enqueues nothing; then the call can be captured."""
    inputs = make_flex_inputs(case)
    want = attend(inputs, form)
    arrays = inputs.q, inputs.k, inputs.v
    keywords = {**inputs.keywords(form), "return_lse": True}
    torch.cuda.synchronize()
    with no_kernel_loaded():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        rawmla.warmup_call(rawmla.flex_attention, *arrays, **keywords)
        assert torch.cuda.current_stream().query()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        loaded = len(loaded_labels())
        assert loaded == (3 if case.block == (64, 64) else 1)  # and those that make blocks of 128
        graph, got = capture(lambda: rawmla.flex_attention(*arrays, **keywords))
        assert len(loaded_labels()) == loaded
        graph.replay()
        assert_same_results("replayed", got, want[:2])
        torch.cuda.synchronize()


def test_flex_warmup_call_of_a_block_mask() -> None:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < 77

    want = rawmla.create_block_mask(mask, None, None, 500, 600)
    torch.cuda.synchronize()
    with no_kernel_loaded():
        rawmla.warmup_call(rawmla.create_block_mask, mask, None, None, 500, 600)
        assert len(loaded_labels()) == 2
        graph, got = capture(lambda: rawmla.create_block_mask(mask, None, None, 500, 600))
        graph.replay()
        assert torch.equal(got.kv_indices, want.kv_indices)
        torch.cuda.synchronize()


def test_flex_kernels_are_used_again() -> None:
    """Only dtype, head dimensions (in steps of 32) and the text of functions choose a kernel: numbers and
    tensors of functions, lengths, heads, strides, scale and blocks do not.
    """
    base = FlexCase(s_q=70, s_k=90, score="alibi table", mask="window")
    same = (
        base,
        replace(base, b=5, h_q=12, h_kv=3, s_q=300, s_k=1000, layout="slice"),
        replace(base, b=3, b_kv=1, s_q=1, s_k=2000, layout="tokens"),
        replace(base, d_qk=59, d_v=40, scale=0.3, seed=3),
        replace(base, block=(256, 128), separate=False),
        replace(base, h_q=40, h_kv=40),
    )
    with no_kernel_loaded():
        for case in same:
            for _ in range(2):
                attend(make_flex_inputs(case))
        assert len(loaded_labels()) == 1, loaded_labels()
        for case in (replace(base, block=(64, 64)), replace(base, s_q=300, block=(96, 32))):
            attend(make_flex_inputs(case))
        # The function that hides small blocks is another mask; two kernels make its lists.
        assert len(loaded_labels()) == 4, loaded_labels()
        for width in range(3):

            def mask(b: Any, h: Any, q: Any, k: Any, width: int = width) -> Any:
                return (q >= k) & (q - k <= width)

            inputs = make_flex_inputs(base)
            assert inputs.block_mask is not None
            attend(inputs, block_mask=with_mask_mod(inputs.block_mask, mask))
        assert len(loaded_labels()) == 4, loaded_labels()
        attend(make_flex_inputs(base), max_scores=True)
        assert len(loaded_labels()) == 5
        torch.cuda.synchronize()  # before the kernels are let go of


def test_functions_that_change_between_calls() -> None:
    """Numbers and tensors that a function closes over are read at every call; its Python branches too."""
    inputs = make_flex_inputs(FlexCase(s_q=200, s_k=277))
    table = torch.randn(277, device="cuda")
    state: dict[str, Any] = {"factor": 1.0, "adds": False}

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = s * state["factor"]
        return s + table[k] if state["adds"] else s

    def want(factor: float, bias: Any) -> Any:
        scores = factor * 0.125 * (inputs.q.double() @ inputs.k.double().transpose(2, 3))
        weights = torch.softmax(scores + (0 if bias is None else bias.double()), -1)
        return weights @ inputs.v.double(), None, None

    for factor, adds in ((1.0, False), (0.5, False), (0.5, True), (2.0, True), (1.0, False)):
        state.update(factor=factor, adds=adds)
        table.normal_()
        check_flex(inputs, (attend(inputs, score_mod=score)[0], None, None), (
            want(factor, table if adds else None)
        ))  # fmt: skip


IN_A_PROCESS = """
import sys, torch, rawmla
from rawmla.jit import nvrtc

def refuse(*arguments, **keywords):
    raise AssertionError("compiled again")

again = sys.argv[1] == "again"
if again:
    nvrtc.compile_source = refuse
length, width = (300, 70) if again else (200, 30)
table = torch.randn(4, length, device="cuda", requires_grad=True)
documents = torch.randint(0, 3, (2, length), device="cuda").sort().values

def score(s, b, h, q, k):
    return s * 0.5 + table[h, k] - (q - k) / width

def mask(b, h, q, k):
    return (documents[b, q] == documents[b, k]) & (q - k <= width)

cuda = rawmla.CudaMod(
    "score + bias(h, kv_idx)", {"bias": table}, grad="grad", capture_grads={"bias": ("h, kv_idx", "grad")}
)
q, k, v = (torch.randn(2, 4, length, 64, device="cuda", dtype=torch.float16) for _ in range(3))
q.requires_grad_()
for block, score_mod in ((128, score), (64, cuda)):
    blocks = rawmla.create_block_mask(mask, 2, None, length, length, BLOCK_SIZE=block)
    rawmla.flex_attention(q, k, v, score_mod, blocks).sum().backward()
torch.cuda.synchronize()
assert bool(table.grad.isfinite().all()) and bool(q.grad.isfinite().all())
"""


def test_a_new_process_compiles_nothing(tmp_path: Path) -> None:
    """With other numbers, tensors and lengths too: forward, backward and block masks."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAWMLA_CACHE_DIR": str(cache)}
    for which, compiles in (("first", True), ("again", False)):
        before = set(cache.rglob("*.cubin"))
        ran = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS, which],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert (set(cache.rglob("*.cubin")) > before) == compiles


# ---- threads


def test_flex_threads() -> None:
    """A thread per case, each with a stream of its own, gets the bits that it would get alone."""
    cases = [*CASES, *(replace(case, seed=9) for case in CASES)]
    calls = [make_flex_inputs(case) for case in cases]
    wanted = [attend(inputs) for inputs in calls]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in calls]
    errors: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(inputs: FlexInputs, own: list[Any]) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                own.extend(attend(inputs) for _ in range(20))
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    def run_all() -> None:
        for own in results:
            own.clear()
        threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, results, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def check_all() -> None:
        assert not errors, errors
        torch.cuda.synchronize()
        for own, want in zip(results, wanted, strict=True):
            assert len(own) == 20
            for got in own:
                assert_same_results("in a thread", got, want)

    run_all()
    check_all()
    with no_kernel_loaded():  # every thread prepares its calls, and loads kernels
        run_all()
        check_all()


# ---- torch.compile


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("backend", ("inductor", "aot_eager"))
@each
def test_flex_compiled(case: FlexCase, backend: str) -> None:
    """A program with a call in it, which breaks the graph."""
    inputs = make_flex_inputs(case)
    keywords = inputs.keywords()

    def step(q: Any, k: Any, v: Any) -> Any:
        out, lse = rawmla.flex_attention(q * 2, k, v, return_lse=True, **keywords)
        return out * 2, lse + 1

    arrays = inputs.q, inputs.k, inputs.v
    compiled = torch.compile(step, backend=backend)
    want = step(*arrays)
    for _ in range(2):
        assert_same_results("compiled", compiled(*arrays), want)
