"""What a decoder keeps of the tokens that it has seen, so that each token is computed once."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lapbench.heads.mixing import needs_average

if TYPE_CHECKING:
    from lapbench.backbones.decoder import Decoder


class KVCache:
    """Keys and values of a batch, and for layers with averaging kinds the running sum of the values.

    Args:
        decoder: The model whose forward passes fill the cache.
        batch: Number of sequences B.
        length: Most tokens of a sequence, its left padding included.
        padding: [B], the number of padding tokens at the start of each sequence; None for none.
        dtype: Of keys and values; by default what the model computes in, autocast considered.
        device: By default the model's.

    Attributes:
        length: Tokens held of each sequence, padding included.
        capacity: Most tokens.
        padding: As given.
    """

    def __init__(
        self,
        decoder: "Decoder",
        batch: int,
        length: int,
        *,
        padding: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        weight = decoder.embedding.weight
        device = device or weight.device
        if dtype is None:
            autocast = torch.is_autocast_enabled(device.type)
            dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        self.capacity = length
        self.length = 0
        self.padding = None if padding is None else padding.to(device)
        # Known here once, so that no forward pass waits for the device.
        self.least_padding = 0 if padding is None else int(padding.min())
        width = decoder.embed_dim // decoder.num_heads
        shape = (batch, decoder.num_kv_heads, length, width)
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(decoder.num_layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(decoder.num_layers)]
        wide = torch.promote_types(dtype, torch.float32)
        self._sums = {
            i: torch.zeros(batch, decoder.num_kv_heads, 1, width, dtype=wide, device=device)
            for i, kinds in enumerate(decoder.schedule.layers)
            if needs_average(kinds)
        }

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values [B, G, T, d] of a layer's new tokens; returns those of all its tokens, [B, G, S, d]."""
        end = self.length + key.size(-2)
        self._keys[layer][:, :, self.length : end] = key
        self._values[layer][:, :, self.length : end] = value
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def add_to_sums(self, layer: int, sums: Tensor) -> Tensor:
        """Prefix sums of the values over all tokens, from those over the new tokens, [B, G, T, d] both."""
        sums = sums + self._sums[layer]
        self._sums[layer] = sums[:, :, -1:] if sums.size(-2) else self._sums[layer]
        return sums

    def advance(self, tokens: int) -> None:
        """Counts the new tokens, once all layers have added them."""
        self.length += tokens

    def select(self, rows: Tensor) -> None:
        """Keeps the sequences ``rows`` only, in that order."""
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]
        self._sums = {layer: sums[rows] for layer, sums in self._sums.items()}
        if self.padding is not None:
            self.padding = self.padding[rows]
            self.least_padding = int(self.padding.min())
