"""The policy: a small decoder-only transformer as Llama's, in plain PyTorch, on a CPU or a GPU.

RMS norms before each block, rotary positions, SwiGLU, and one matrix for reading and writing tokens. It computes the
same function three ways: `hidden` over whole conversations, to learn; `prefill` and `decode` with a cache of keys and
values, to generate. The tests hold them to each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tasks import CONTEXT_TOKENS
from .tokenizer import VOCABULARY_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model; the defaults make about half a million parameters."""

    vocabulary: int = VOCABULARY_SIZE
    context: int = CONTEXT_TOKENS
    """Most tokens of a conversation."""
    width: int = 64
    layers: int = 2
    heads: int = 2
    inner: int = 192
    """Width inside the SwiGLU."""


@dataclass(slots=True)
class KeyValueCache:
    """What attention remembers of the conversations in the first rows; owned by who generates.

    A row holds one conversation; beyond its length there may be anything.
    """

    keys: Tensor
    """float32 [layers, rows, heads, context, width / heads], as `values`."""
    values: Tensor

    @classmethod
    def empty(cls, shape: ModelShape, rows: int, device: torch.device) -> Self:
        size = (shape.layers, rows, shape.heads, shape.context, shape.width // shape.heads)
        return cls(torch.zeros(size, device=device), torch.zeros(size, device=device))

    def move(self, source: int, target: int) -> None:
        for part in (self.keys, self.values):
            part[:, target] = part[:, source]


class _Block(nn.Module):
    """One layer: attention, then SwiGLU, each added to what came in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.inner_norm = nn.RMSNorm(shape.width)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def project(self, stream: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys, values [B, heads, T, width / heads]; queries and keys rotated to their positions."""
        batch, length, width = stream.shape
        joint = self.query_key_value(self.attention_norm(stream))
        parts = joint.view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        return _rotate(query, rotation), _rotate(key, rotation), value

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Add what attention found, [B, heads, T, width / heads], and the SwiGLU of it."""
        stream = stream + self.attention_out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.inner_norm(stream)).chunk(2, dim=-1)
        finished: Tensor = stream + self.down(functional.silu(gate) * up)
        return finished


class Model(nn.Module):
    _rotations: Tensor

    def __init__(self, shape: ModelShape | None = None, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape = shape or ModelShape()
        with torch.random.fork_rng(devices=[]):  # layers draw parameters of their own, which are not kept
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
        self.register_buffer("_rotations", _rotations(shape), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The sum of all layers' outputs stays as wide as one of them (as GPT-2 has it).
                depth = (2 * shape.layers) ** -0.5 if name.endswith(("attention_out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=depth * shape.width**-0.5, generator=generator)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return the last layer's output over whole conversations, [B, T, width]."""
        stream, rotation = self.embedding(token_ids), self._rotations[: token_ids.shape[1]]
        for block in self._layers():
            query, key, value = block.project(stream, rotation)
            stream = block.finish(stream, functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        normed: Tensor = self.norm(stream)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the next token, [..., vocabulary]."""
        return functional.linear(hidden, self.embedding.weight)

    def prefill(self, token_ids: Tensor, lengths: Tensor, cache: KeyValueCache, first: int) -> Tensor:
        """Read conversations into rows `first` to `first + N` of the cache; return the scores of what follows each.

        Returns:
            float32 [N, vocabulary].
        """
        count, longest = token_ids.shape
        stream, rotation = self.embedding(token_ids), self._rotations[:longest]
        for layer, block in enumerate(self._layers()):
            query, key, value = block.project(stream, rotation)
            cache.keys[layer, first : first + count, :, :longest] = key
            cache.values[layer, first : first + count, :, :longest] = value
            stream = block.finish(stream, functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return self.logits(self.norm(stream[torch.arange(count, device=self.device), lengths - 1]))

    def decode(self, token_ids: Tensor, lengths: Tensor, cache: KeyValueCache) -> Tensor:
        """Add one token to each conversation in the first B rows of the cache; return the scores of what follows.

        Returns:
            float32 [B, vocabulary].
        """
        count, longest = len(token_ids), int(lengths.max()) + 1
        rows = torch.arange(count, device=self.device)
        stream = self.embedding(token_ids)[:, None]
        rotation = self._rotations[lengths][:, None, None]
        seen = (torch.arange(longest, device=self.device) <= lengths[:, None])[:, None, None]
        for layer, block in enumerate(self._layers()):
            query, key, value = block.project(stream, rotation)
            keys, values = cache.keys[layer], cache.values[layer]
            keys[rows, :, lengths], values[rows, :, lengths] = key[:, :, 0], value[:, :, 0]
            attended = functional.scaled_dot_product_attention(
                query, keys[:count, :, :longest], values[:count, :, :longest], attn_mask=seen
            )
            stream = block.finish(stream, attended)
        return self.logits(self.norm(stream[:, 0]))

    def _layers(self) -> Iterator[_Block]:
        for block in self.blocks:
            assert isinstance(block, _Block)
            yield block


def _rotations(shape: ModelShape) -> Tensor:
    """Return cosine and sine of each place's and pair of dimensions' angle, [context, 2, width / heads / 2]."""
    half = shape.width // shape.heads // 2
    angles = torch.arange(shape.context)[:, None] * ROTARY_BASE ** (-torch.arange(half) / half)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of dimensions of [B, heads, T, d] by its place's angle (Su et al., 2021)."""
    cosine, sine = rotation.unbind(-2)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
