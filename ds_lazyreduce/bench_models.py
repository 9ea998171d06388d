"""Models whose backward costs nothing, so that what the benchmark times is the handling of gradients.

A layer's forward returns a scalar that depends on nothing; its backward hands over gradients that were made
beforehand. Layers form a chain, so that gradients become ready as in training: last layer first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """``layers`` layers of ``tensors`` parameters of ``elements`` elements each.

    vectors: of a layer's tensors, the last ones that are one-dimensional (no weight decay); the others have
        the shape ``[elements, 1]``.
    """

    layers: int
    tensors: int
    elements: int
    vectors: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameter tensors."""
        return self.layers * self.tensors

    @property
    def numel(self) -> int:
        """Number of parameter elements."""
        return self.parameters * self.elements


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chain, gradients, *parameters):
        ctx.gradients = gradients
        return chain.clone()

    @staticmethod
    def backward(ctx, chain_gradient):
        # A new tensor over the same memory: nobody else refers to it, so autograd takes it without a copy.
        return chain_gradient, None, *(gradient.detach() for gradient in ctx.gradients)


class HandOverLayer(torch.nn.Module):
    """One layer: ``parameters`` and the ``gradients`` that its backward hands over, alike in shape."""

    def __init__(self, shape: Shape, dtype: torch.dtype, gradients: list[torch.Tensor]):
        super().__init__()
        self._gradients = gradients
        for index, gradient in enumerate(gradients):
            weight = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))

    def forward(self, chain: torch.Tensor) -> torch.Tensor:
        # Not a ParameterList: walking through one takes longer than all else here.
        return _HandOver.apply(chain, self._gradients, *self._parameters.values())


def hand_over_model(
    shape: Shape,
    device: torch.device,
    *,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    gradient_dtype: torch.dtype = torch.bfloat16,
) -> torch.nn.Sequential:
    """A chain of layers; ``model(torch.zeros((), device=device)).backward()`` hands all gradients over.

    Gradients are small random numbers, other ones for another ``seed``. Layers share them: they are read
    only, and memory for one layer of them is enough.
    """
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for index in range(shape.tensors):
        size = (shape.elements,) if index >= shape.tensors - shape.vectors else (shape.elements, 1)
        gradients.append((torch.randn(size, generator=generator) * 1e-3).to(device, gradient_dtype))
    return torch.nn.Sequential(*(HandOverLayer(shape, dtype, gradients) for _ in range(shape.layers)))


def parameter_groups(model: torch.nn.Sequential, split: str) -> list[dict]:
    """Optimizer param groups: ``"one"``, ``"decay"`` (with and without weight decay) or ``"layers"``."""
    if split == "one":
        return [{"params": list(model.parameters())}]
    if split == "layers":
        return [{"params": list(layer.parameters())} for layer in model]
    if split != "decay":
        raise ValueError(f"split: {split!r} is none of 'one', 'decay', 'layers'")
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
