"""A decode loop as a server runs it: requests join and leave, and every step replays a CUDA graph.

There is a graph for every 16 requests; places without a request have length 0. Between replays the host
changes lengths, block table and tokens in place. The graph computes the plan from them, once for all layers.

Plain torch runs the same steps in CUDA graphs: pages gathered into a dense K, then matrix products and
softmax, or scaled_dot_product_attention. Such a graph computes all that it has room for, so there is one for
every 1,024 tokens of the longest request. A step is attention alone: tables with the queries and the cache
row of a token stand for embedding, projections and experts. Time includes the host's part.

Run it on a machine with a Hopper GPU: python examples/serve_step.py
"""

import argparse
import random
import sys
import time
from functools import partial
from typing import Any

import torch

import rawmla

D_QK, D_V, PAGE, SCALE, VOCABULARY = 576, 512, 64, 576**-0.5, 32
PLACES, BUCKET = 64, 16  # requests at once; a graph for every BUCKET of them
MAX_TOKENS, CONTEXT = 8192, 1024  # of a request; torch has graphs for every CONTEXT of them
NEW_TOKENS, CHECK_EVERY = (16, 150), 25  # least and most of a request; steps
BLOCKS = 1 + PLACES * MAX_TOKENS // PAGE  # page 0 is nobody's
TOLERANCE = 3e-2  # of the norm of a row of results: torch's matrix product rounds scores to bf16


class Server:
    """The host's side, the same at every run. A row: length, tokens to come, newest token, pages."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.numbers = torch.zeros(PLACES, 3 + MAX_TOKENS // PAGE, dtype=torch.int32)
        self.rows = self.numbers.numpy()  # the same memory
        self.free = self.random.sample(range(1, BLOCKS), BLOCKS - 1)
        self.count = 0

    def step(self) -> None:
        """Who is done leaves, others join, and each request gets its next token."""
        rows, free = self.rows, self.free
        for place in range(self.count - 1, -1, -1):
            if rows[place, 1] == 0:
                free += [page for page in rows[place, 3:].tolist() if page != 0]
                self.count -= 1
                rows[place] = rows[self.count]  # the last one takes the place
                rows[self.count] = 0
        while self.count < PLACES and (self.count == 0 or self.random.random() < 0.4):
            prompt = self.random.randrange(256, MAX_TOKENS - NEW_TOKENS[1])  # is in the cache already
            to_come = self.random.randint(*NEW_TOKENS)
            pages = -(-(prompt + to_come) // PAGE)
            rows[self.count, :2] = prompt, to_come
            rows[self.count, 3 : 3 + pages] = [free.pop() for _ in range(pages)]
            self.count += 1
        rows[: self.count, :2] += 1, -1
        rows[: self.count, 2] = self.random.choices(range(VOCABULARY), k=self.count)  # stands for sampling


def step_rawmla(layers: Any, numbers: torch.Tensor, _context: int) -> list[torch.Tensor]:
    """The results of all layers: for each there is a cache, and the queries and cache rows of all tokens."""
    (lengths, _to_come, tokens), table = numbers[:, :3].T.contiguous(), numbers[:, 3:]
    slots = rawmla.convert_indices(lengths[:, None] - 1, table, PAGE).flatten()  # -1 without a request
    plan, _ = rawmla.get_mla_metadata()  # empty: the first layer computes it, in the graph
    outs = []
    for cache, queries, rows in layers:
        q, row = queries[tokens], rows[tokens]
        rawmla.write_kv_cache(row[:, :D_V], row[:, D_V:], cache, slots)
        out, _ = rawmla.flash_mla_with_kvcache(q, cache, table, lengths, D_V, plan, softmax_scale=SCALE)
        outs.append(out)
    return outs


def step_torch(use_sdpa: bool, layers: Any, numbers: torch.Tensor, context: int) -> list[torch.Tensor]:
    """The same by torch, over the first `context` tokens of every place."""
    tokens, pages = numbers[:, 2], numbers[:, 3 : 3 + context // PAGE].long()
    lengths = numbers[:, :1].long().clamp(min=1)  # without a request: a row of page 0
    slots = (pages.gather(1, (lengths - 1) // PAGE) * PAGE + (lengths - 1) % PAGE).flatten()
    mask = torch.zeros(len(numbers), 1, context, dtype=torch.bfloat16, device=numbers.device)
    mask.masked_fill_((torch.arange(context, device=numbers.device) >= lengths)[:, None], float("-inf"))
    outs = []
    for cache, queries, rows in layers:
        q = queries[tokens]
        cache.view(-1, D_QK)[slots] = rows[tokens]
        k = cache[pages].view(len(numbers), 1, context, D_QK)
        v = k[..., :D_V]
        if use_sdpa:  # heads stand where query tokens do, since they share K and V
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None], scale=SCALE)
        else:
            scores = torch.baddbmm(mask, q[:, 0], k[:, 0].transpose(1, 2), alpha=SCALE)
            out = torch.bmm(torch.softmax(scores, dim=-1), v[:, 0])[:, None]
        outs.append(out)
    return outs


def capture(step: Any, pool: Any) -> tuple[Any, list[torch.Tensor]]:
    """A step as a CUDA graph, and its results, which every replay overwrites."""
    step()  # first calls load kernels and libraries, which a capture cannot do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outs = step()
    return graph, outs


def serve(step: Any, layers: Any, numbers: torch.Tensor, steps: int, graphs: dict[Any, Any]) -> Any:
    """Run the loop; returns tokens, seconds, and results of some steps if graphs were to be captured."""
    torch.manual_seed(0)
    for cache, _queries, _rows in layers:
        cache.normal_()  # the prompts
    torch.cuda.synchronize()
    is_first, server, tokens, kept = not graphs, Server(), 0, []
    start = time.perf_counter()
    for number in range(1, steps + 1):
        server.step()
        numbers.copy_(server.numbers)
        places = -(-server.count // BUCKET) * BUCKET
        context = 0 if step is step_rawmla else -(-int(server.rows[:, 0].max()) // CONTEXT) * CONTEXT
        if (places, context) not in graphs:
            pool = next((graph.pool() for graph, _ in graphs.values()), None)  # all graphs share their memory
            graphs[places, context] = capture(partial(step, layers, numbers[:places], context), pool)
        graph, outs = graphs[places, context]
        graph.replay()
        torch.cuda.synchronize()  # a server reads the new tokens here
        tokens += server.count
        if is_first and (steps - number) % CHECK_EVERY == 0:
            kept.append(torch.stack([out[: server.count].float() for out in outs]))
    return tokens, time.perf_counter() - start, kept


def main() -> None:
    parser = argparse.ArgumentParser(description="A decode loop with rawmla and with plain torch.")
    parser.add_argument("--heads", type=int, default=128, help="query heads; 16: DeepSeek-V3 over 8 GPUs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    try:
        rawmla.warmup()
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    print(f"{options.steps} steps, {options.layers} layers, {options.heads} heads, up to {PLACES} requests")
    print(f"{'':23} graphs  ms/step  tokens/s  rawmla is  difference", flush=True)
    torch.manual_seed(0)
    numbers = torch.zeros_like(Server().numbers, device="cuda")
    shapes = (BLOCKS, PAGE, 1, D_QK), (VOCABULARY, 1, options.heads, D_QK), (VOCABULARY, D_QK)
    layers = [[torch.randn(x, device="cuda").bfloat16() for x in shapes] for _ in range(options.layers)]
    ways = step_rawmla, partial(step_torch, False), partial(step_torch, True)
    ours, want = 0.0, None
    for name, step in zip(("rawmla", "torch, matrix products", "torch, SDPA"), ways, strict=True):
        graphs: dict[Any, Any] = {}
        _, _, got = serve(step, layers, numbers, options.steps, graphs)  # captures
        tokens, seconds, _ = serve(step, layers, numbers, options.steps, graphs)
        ours, want = ours or seconds, want or got
        differences = [((x - y).norm(dim=-1) / y.norm(dim=-1)).max() for x, y in zip(got, want, strict=True)]
        difference = torch.stack(differences).max()  # NaN if there is one
        row = f"{name:23}{len(graphs):7d}{1e3 * seconds / options.steps:9.3f}{tokens / seconds:10.0f}"
        print(f"{row}{seconds / ours:10.2f}x{difference:12.4f}", flush=True)
        if not difference <= TOLERANCE:
            sys.exit(
                f"serve_step: a row of results differs from rawmla's by more than {TOLERANCE} of its norm"
            )
    print(f"serve_step: torch's results are rawmla's, every row within {TOLERANCE} of its norm")


if __name__ == "__main__":
    main()
