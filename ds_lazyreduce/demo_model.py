"""What the demo trains: model, parameter groups, schedule and data of a byte-level GPT.

Nothing is downloaded: the text is the ``*.py`` files of the interpreter's standard library.
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY = 256  # one token per byte value
PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Shape of a :class:`ByteGPT`; ``context`` is the window length in bytes."""

    width: int
    layers: int
    heads: int
    context: int


SIZES = {
    "tiny": ModelSize(width=64, layers=2, heads=4, context=64),
    "small": ModelSize(width=128, layers=4, heads=4, context=128),
}


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention over ``x`` of shape ``[batch, time, width]``."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(y.transpose(1, 2).reshape(batch, time, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class ByteGPT(nn.Module):
    """Byte-level GPT whose ``forward`` returns the mean (or summed) cross-entropy in nats."""

    def __init__(self, size: ModelSize):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, size.width)
        self.position_embedding = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.final_norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.apply(_init_weights)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Loss of predicting ``targets`` from ``tokens``, both int64 of shape ``[batch, time]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        # In fp32: a bf16 log-sum-exp has three significant digits.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction=reduction)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def parameter_groups(model: nn.Module) -> list[dict]:
    """Two groups: matrices, which decay as the optimizer is told, and biases and norms, which do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]


def warmup_cosine(steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Factory of a ``LambdaLR``: linear warm-up over a tenth of ``steps``, then cosine down to 10 %."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * progress))

    def build(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, factor)

    return build


def load_corpus(max_bytes: int = 4_000_000) -> torch.Tensor:
    """Source text of the standard library as a uint8 vector of at most ``max_bytes`` elements."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _source_files(root):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources under {root}")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def _source_files(root: Path) -> Iterator[Path]:
    """The packages first: they are small, and the top-level modules alone would fill the limit."""
    for package in PACKAGES:
        yield from sorted((root / package).rglob("*.py"))
    yield from sorted(root.glob("*.py"))


@dataclasses.dataclass(frozen=True)
class RandomWindows:
    """Draws micro-batches of text windows; a micro-step's draw depends on nothing but these fields.

    Every rank draws the starts of all ranks from one generator and keeps its own share: what the ranks
    read together in a micro-step is one reproducible sample.
    """

    corpus: torch.Tensor  # uint8 vector
    batch: int
    context: int
    seed: int
    rank: int
    world_size: int

    def draw(self, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``(tokens, targets)`` of this rank, int64 ``[batch, context]``; targets are one byte ahead."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + micro_step)
        drawn = (self.world_size, self.batch)
        starts = torch.randint(len(self.corpus) - self.context, drawn, generator=generator)[self.rank]
        windows = self.corpus[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
