"""Training a tiny transformer with dense attention: autograd through rawmla beside torch's own attention.

Two models start from the same weights and see the same batches: one attends with `rawmla.flash_attn_func`,
the other with torch's scaled_dot_product_attention, both in bfloat16. The task: the second half of a sequence
repeats its first half. Both loss curves are printed, and have to end in the same place. Before that, the
gradients of one call are held against the reference on the CPU.

Run it on a machine with a Hopper GPU: python examples/train_tiny.py
"""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

import rawmla

VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS, BATCH = 32, 128, 128, 2, 2, 32
HEAD_DIM = WIDTH // HEADS
STEPS, SHOWN = 400, 40  # a loss is printed every so many steps
LEARNED, TOLERANCE = 0.3, 0.1  # of the mean loss over the last steps shown; guessing costs ln(32) = 3.5
GRADIENT_TOL = 2**-7  # relative error of a whole gradient: products are of bfloat16 numbers

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_rawmla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of `[batch, tokens, heads, head_dim]`."""
    out, _ = rawmla.flash_attn_func(q, k, v, causal=True)
    return out


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by torch, which has heads before tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"rawmla": by_rawmla, "torch": by_torch}
"""Ways to compute the same attention; each trains a model, and is compared with the last one."""


class Block(torch.nn.Module):
    """Attention and a small network, each around a residual."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.qkv(self.norms[0](x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = projected.unbind(2)  # slices of one array, which rawmla reads as they lie
        x = x + self.out(self.attention(q, k, v).flatten(2).float())
        return x + self.network(self.norms[1](x))


class Model(torch.nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.blocks = torch.nn.Sequential(*[Block(attention) for _ in range(LAYERS)])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]]))


def train(attention: Attention, device: str) -> list[float]:
    """The mean losses of every `SHOWN` steps of a model with this attention."""
    torch.manual_seed(0)  # the same weights and the same batches for every attention
    model = Model(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1)
    losses = torch.zeros(STEPS, device=device)
    for step in range(STEPS):
        half = torch.randint(VOCABULARY, (BATCH, TOKENS // 2), generator=draw).to(device)
        sequence = torch.cat([half, half], dim=1)
        predicted = model(sequence[:, :-1])[:, TOKENS // 2 - 1 :]
        loss = F.cross_entropy(predicted.flatten(0, 1), half.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()  # read at the end: no step waits for the GPU
    return losses.view(-1, SHOWN).mean(1).tolist()


def check_gradients() -> None:
    """Gradients of one call, through out and lse, are those of the reference."""
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
    curves = {name: train(attention, "cuda") for name, attention in ATTENTIONS.items()}
    for name, losses in curves.items():
        print(f"{name:7}", " ".join(f"{loss:6.3f}" for loss in losses))
    *ours, (_, wanted) = [(name, losses[-1]) for name, losses in curves.items()]
    for name, last in ours:
        if not (last < LEARNED and abs(last - wanted) < TOLERANCE):
            sys.exit(f"train_tiny: {name} ends with a loss of {last:.3f}, torch with {wanted:.3f}")
    print(f"train_tiny: {STEPS} steps of {BATCH} sequences of {TOKENS} tokens end in the same place")


if __name__ == "__main__":
    main()
