"""Training a tiny transformer: autograd through rawmla beside torch's own attention.

Two models start from the same weights and see the same batches: one attends with rawmla, the other with
torch's scaled_dot_product_attention, both in bfloat16. The task: the second half of a document repeats its
first half.

- Dense: a row is one document; `rawmla.flash_attn_func`, causal.
- Flex: a row is documents of random lengths, other ones at every step; `rawmla.flex_attention` with a mask
  function for documents and one for causality. torch gets the same mask as a dense array.

Loss curves are printed, and have to stay together. Before that, the gradients of one call of dense attention
are held against the reference on the CPU.

Run it on a machine with a Hopper GPU (less than a minute): python examples/train_tiny.py
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import rawmla

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS, BATCH = 32, 128, 128, 2, 2, 32
HEAD_DIM = WIDTH // HEADS
DOCUMENTS = 3  # of a row, with flex attention
STEPS, SHOWN = 400, 40  # a mean loss is printed every SHOWN steps
LEARNED = 0.5  # of the last mean loss; guessing costs ln(32) = 3.5
BOUND = 0.1  # of the difference of mean losses
# By rounding alone torch's attention in bfloat16, with float32 products, and with probabilities rounded once
# more trains curves that part by at most 0.017 with documents (two seeds, on a CPU); without a mask, by 2.
# A row of one document is learned in jumps, whose step depends on rounding, and may jump back: there the
# least losses are compared.
GRADIENT_TOL = 2**-7  # relative error of a whole gradient: products are of bfloat16 numbers

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def dense_by_rawmla(document: torch.Tensor) -> Attend:
    return lambda q, k, v: rawmla.flash_attn_func(q, k, v, causal=True)[0]


def dense_by_torch(document: torch.Tensor) -> Attend:
    return lambda q, k, v: transposed(F.scaled_dot_product_attention, q, k, v, is_causal=True)


def flex_by_rawmla(document: torch.Tensor) -> Attend:
    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return document[b, q_idx] == document[b, kv_idx]

    visible = rawmla.and_masks(causal, same_document)
    block_mask = rawmla.create_block_mask(visible, BATCH, None, TOKENS, TOKENS)
    return lambda q, k, v: transposed(rawmla.flex_attention, q, k, v, block_mask=block_mask)


def flex_by_torch(document: torch.Tensor) -> Attend:
    place = torch.arange(TOKENS, device=document.device)
    visible = (place[:, None] >= place) & (document[:, :, None] == document[:, None, :])
    return lambda q, k, v: transposed(F.scaled_dot_product_attention, q, k, v, attn_mask=visible[:, None])


def transposed(function: Callable[..., Any], *arrays: torch.Tensor, **options: Any) -> torch.Tensor:
    """Calls a function that has heads before tokens."""
    out: torch.Tensor = function(*[x.transpose(1, 2) for x in arrays], **options)
    return out.transpose(1, 2)


class Block(torch.nn.Module):
    """Attention and a small network, each around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        projected = self.qkv(self.norms[0](x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = projected.unbind(2)  # slices of one array, which rawmla reads in place
        x = x + self.out(attend(q, k, v).flatten(2).float())
        return x + self.network(self.norms[1](x))


class Model(torch.nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions[places]
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)


def batch(documents: int, draw: torch.Generator) -> torch.Tensor:
    """Rows of documents, int64 `[4, BATCH, TOKENS]`: tokens, their documents, their places in these, and the
    next tokens where they are a repetition, else -1.
    """
    halves = torch.randint(1, TOKENS // 2, (BATCH, documents - 1), generator=draw).sort().values
    ends = torch.cat([torch.zeros(BATCH, 1), halves, torch.full((BATCH, 1), TOKENS // 2)], 1).long() * 2
    place = torch.arange(TOKENS).expand(BATCH, -1).contiguous()
    document = torch.searchsorted(ends, place, right=True) - 1
    start, end = ends.gather(1, document), ends.gather(1, document + 1)
    half = (end - start) // 2
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=draw)
    tokens = tokens.gather(1, place - torch.where(place - start >= half, half, 0))
    is_repeated = (place + 1 - start >= half) & (place + 1 < end)
    wanted = torch.where(is_repeated, tokens.roll(-1, 1), -1)
    return torch.stack([tokens, document, place - start, wanted])


def train(name: str, attention: Callable[[torch.Tensor], Attend], documents: int, device: str) -> list[float]:
    """The mean losses of every `SHOWN` steps of a model with this attention."""
    torch.manual_seed(0)  # the same weights and the same batches for every attention
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1)
    losses = torch.zeros(STEPS, device=device)
    began = time.perf_counter()
    for step in range(STEPS):
        tokens, document, places, wanted = batch(documents, draw).to(device)
        predicted = model(tokens, places, attention(document))
        loss = F.cross_entropy(predicted.flatten(0, 1), wanted.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()  # read at the end of a line: other steps do not wait for the GPU
        if (step + 1) % (STEPS // 4) == 0:
            print(f"{name}: step {step + 1}, loss {float(loss.detach()):.3f}", flush=True)
    means = losses.view(-1, SHOWN).mean(1).tolist()
    print(
        f"{name:16}",
        *[f"{loss:6.3f}" for loss in means],
        f"  {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return means


def check_gradients() -> None:
    """Gradients of one call, through out and lse, equal the reference's."""
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    out, lse = rawmla.flash_attn_func(leaves[0], leaves[1], leaves[2], causal=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    out, lse = rawmla.reference.flash_attn_func(q, k, v, causal=True)
    want = rawmla.reference.flash_attn_backward(dout.cpu(), q, k, v, out, lse, causal=True, dlse=dlse.cpu())
    for name, one, other in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = float((one.cpu().double() - other.double()).norm() / other.double().norm())
        if not error <= GRADIENT_TOL:
            sys.exit(f"train_tiny: relative error of {name} {error:.2g}")
    print(f"gradients of q, k and v are within {GRADIENT_TOL:.1g} of the reference")


def main() -> None:
    try:
        dims = [(HEAD_DIM, HEAD_DIM)]
        rawmla.warmup("mha", "mha_backward", mha_head_dims=dims, mha_backward_head_dims=dims)
    except rawmla.RawMLAError as error:
        sys.exit(str(error))

    check_gradients()
    for half, ours, theirs, documents in (
        ("dense", dense_by_rawmla, dense_by_torch, 1),
        ("flex", flex_by_rawmla, flex_by_torch, DOCUMENTS),
    ):
        curve = train(f"{half}, rawmla", ours, documents, "cuda")
        wanted = train(f"{half}, torch", theirs, documents, "cuda")
        apart = [abs(one - other) for one, other in zip(curve, wanted, strict=True)]
        print(f"{half}: the curves part by at most {max(apart):.4f}, at the end by {apart[-1]:.4f}")
        compared = max(apart) if documents > 1 else abs(min(curve) - min(wanted))
        if not (compared <= BOUND and min(curve) < LEARNED):
            sys.exit(
                f"train_tiny: {half} attention ends with a loss of {curve[-1]:.3f}, torch's with "
                f"{wanted[-1]:.3f}; curves may part by {BOUND}"
            )
    print(f"train_tiny: {STEPS} steps of {BATCH} rows of {TOKENS} tokens, alike with rawmla and with torch")


if __name__ == "__main__":
    main()
