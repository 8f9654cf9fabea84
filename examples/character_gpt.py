"""A character GPT on sentences of a small grammar, whose entropy is known: how near does the loss come to it?

python examples/character_gpt.py --steps 300
"""

import argparse
import math
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoopt import AutoAdam

GRAMMAR = [["the ", "a ", "my ", "no "], ["red ", "old "], ["fox ", "dog ", "cat ", "hen "], ["saw ", "fed "], ["it. "]]


def sentences(count: int) -> str:
    return "".join(random.choice(words) for _ in range(count) for words in GRAMMAR)


def nats_per_character() -> float:
    """What no model can do better than: the choices in a sentence, over its mean length."""
    choices = sum(math.log(len(words)) for words in GRAMMAR)
    return choices / sum(sum(map(len, words)) / len(words) for words in GRAMMAR)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # (batch, heads, time, channels) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads=4) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand_as(x)  # every layer's first axis is the batch
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(positions))))


def main() -> None:
    parser = argparse.ArgumentParser(description="A character GPT on a small grammar.")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    text = sentences(2000)
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    context, batch_size = 48, 16

    model = GPT(len(alphabet), context)
    optimizer = AutoAdam(model)
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(len(data) - context, (batch_size, 1))
        x = data[starts + torch.arange(context + 1)]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    final = sum(losses[-20:]) / len(losses[-20:])
    print(f"loss {final:.3f} nats per character; the language itself has {nats_per_character():.3f}")


if __name__ == "__main__":
    main()
