"""Depth routing in a GPT written from scratch: `python examples/gpt_from_scratch.py --steps 50`.

The model is plain PyTorch; `DepthRouter` takes the place of its residual stream. It trains on the bytes of the novels
that come with the package and prints which sources the final site reads.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mhar import DepthRouter
from mhar.demo.corpus import load_corpus


class Attention(nn.Module):
    """Causal multi-head self-attention with learned positions added by the caller."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    """Bytes [batch, tokens] -> logits [batch, tokens, 256]. `routing_heads=None` is the ordinary residual stream."""

    def __init__(self, width: int, num_layers: int, num_heads: int, context: int, routing_heads: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        layers = ((Attention(width, num_heads), MLP(width)) for _ in range(num_layers))
        self.sublayers = nn.ModuleList(sublayer for layer in layers for sublayer in layer)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in self.sublayers)
        self.final_norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.router = None
        if routing_heads is not None:
            self.router = DepthRouter(num_sites=2 * num_layers + 1, width=width, num_heads=routing_heads)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        if self.router is None:
            for norm, sublayer in zip(self.norms, self.sublayers, strict=True):
                x = x + sublayer(norm(x))
        else:
            history = self.router.start(x)
            for norm, sublayer in zip(self.norms, self.sublayers, strict=True):
                history.append(sublayer(norm(history.read())))
            x = history.read()
        return self.head(self.final_norm(x))


def batches(text: str, batch_size: int, context: int, seed: int = 0):
    """Endless random windows of `text` as byte ids [batch_size, context + 1]."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context, (batch_size,), generator=generator).tolist()
        yield torch.stack([data[start : start + context + 1] for start in starts])


def train(model: GPT, steps: int, batch_size: int = 8, context: int = 64, seed: int = 0) -> list[float]:
    """Train on the novels and return the loss of every step, in nats per byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = "\n".join(load_corpus(held_out="persuasion").training)
    losses: list[float] = []
    for _, ids in zip(range(steps), batches(text, batch_size, context, seed), strict=False):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=100)
    steps = options.parse_args().steps
    for routing_heads in (None, 1, 4):
        torch.manual_seed(0)
        model = GPT(width=64, num_layers=4, num_heads=4, context=64, routing_heads=routing_heads)
        losses = train(model, steps)
        last = losses[-10:]
        print(f"routing heads {routing_heads}: loss {losses[0]:.3f} -> {sum(last) / len(last):.3f} nats per byte")
    show_final_site(model)


def show_final_site(model: GPT) -> None:
    """Print each source's mean weight at the final site, per routing head."""
    assert model.router is not None
    ids = next(batches(load_corpus(held_out="persuasion").held_out, batch_size=4, context=64))[:, :-1]
    rows: list[str] = []

    def collect(read) -> None:
        if read.name == "final":
            means = read.weights.flatten(1, -2).mean(dim=1)
            rows.extend(
                f"  {name:<14}" + "".join(f"{weight:7.3f}" for weight in weights)
                for name, weights in zip(read.source_names, means.tolist(), strict=True)
            )

    with torch.no_grad(), model.router.observe(collect):
        model(ids)
    print("weights of the final site, one column per routing head:", *rows, sep="\n")


if __name__ == "__main__":
    main()
