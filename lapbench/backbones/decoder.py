"""A GPT decoder with a head schedule: nanochat's family, Llama-like and post-norm models."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lapbench.backbones.cache import KVCache
from lapbench.backbones.decoder_layers import Attention, Block, Pass, build_norm
from lapbench.backbones.decoder_ops import rotary_table
from lapbench.backbones.decoder_presets import Architecture, DecoderSettings, resolve
from lapbench.backbones.weights import read_state, without_prefixes
from lapbench.errors import UserError
from lapbench.heads.schedule import HeadSchedule


class Decoder(nn.Module):
    """A causal language model whose heads follow a schedule; schedules change no parameter but those of learned heads.

    Attributes:
        architecture: All settings of the model.
        embed_dim: Width D of the tokens.
        num_layers: Number of blocks L.
        num_heads: Query heads H of each block.
        num_kv_heads: Key and value heads G of each block.
        num_prefix_tokens: 0, as there are no class tokens.
        schedule: Kind of each head.
        vocab_size: Number of tokens V.
        context: Longest sequence.
    """

    num_prefix_tokens = 0
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, architecture: Architecture, schedule: HeadSchedule, vocab_size: int) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.schedule = schedule
        self.vocab_size = vocab_size
        self.embed_dim, self.num_layers = a.width, a.depth
        self.num_heads, self.num_kv_heads, self.context = a.num_heads, a.num_kv_heads, a.context
        self.grad_checkpointing = False
        self.embedding = nn.Embedding(vocab_size, a.width)
        self.positions = nn.Embedding(a.context, a.width) if a.positions == "learned" else None
        self.embed_norm = build_norm(a.norm, a.width) if a.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(a, kinds, i) for i, kinds in enumerate(schedule.layers))
        self.norm = build_norm(a.norm, a.width) if a.norm_position == "pre" else nn.Identity()
        self.head = nn.Linear(a.width, vocab_size, bias=False)
        if a.tied:
            self.head.weight = self.embedding.weight
        if a.positions == "rope":
            cos, sin = rotary_table(a.context, a.head_width, a.rope_base)
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Starts all matrices anew, as ``architecture.init`` says.

        "nanochat": N(0, (1/sqrt(fan_in)) min(1, sqrt(fan_out/fan_in))) (arXiv 2310.17813, eq. 8), output projections
        of attention and MLP 0, token embedding N(0, 1). So at the start every schedule gives the same logits.
        """
        a = self.architecture
        scaled = a.init == "nanochat"
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                fan_out, fan_in = module.weight.shape
                std = min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in) if scaled else a.init_std
                nn.init.normal_(module.weight, std=std)
        if scaled:
            for name, module in self.blocks.named_modules():
                if name.endswith(("attn.o_proj", "mlp.fc2", "mlp.down_proj")):
                    assert isinstance(module, nn.Linear)
                    nn.init.zeros_(module.weight)
        nn.init.normal_(self.embedding.weight, std=1.0 if scaled and not a.tied else a.init_std)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=a.init_std)
        if not a.tied:
            nn.init.normal_(self.head.weight, std=a.head_std)

    def forward(self, tokens: Tensor, *, padding: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: Token numbers, [B, T].
            padding: [B], the number of padding tokens at the start of each sequence; what comes out there is finite
                and means nothing. With a cache, give it to the cache.
            cache: Keys and values of the tokens before, to which those of ``tokens`` are added.

        Returns:
            [B, T, V], in float32 at least where they are soft-capped.

        Raises:
            UserError: Sequences longer than the context.
        """
        return self.forward_head(self.forward_features(tokens, padding=padding, cache=cache))

    def forward_features(
        self, tokens: Tensor, *, padding: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Tokens [B, T, D] after the last norm; arguments and errors as for ``forward``."""
        x, now = self._embed(tokens, padding, cache)
        for block in self.blocks:
            x = self._run(block, x, now)
        if cache is not None:
            cache.advance(tokens.size(1))
        out: Tensor = self.norm(x)
        return out

    def forward_head(self, x: Tensor) -> Tensor:
        """Logits [..., V] of tokens [..., D] after the last norm."""
        logits: Tensor = self.head(x)
        cap = self.architecture.softcap
        if cap:
            logits = cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)
        return logits

    def forward_intermediates(
        self, x: Tensor, indices: int | Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Tokens after the chosen blocks.

        Args:
            x: Token numbers, [B, T].
            indices: The last n blocks for an int, all for None, or the blocks to take (negative ones from the end).
            norm: Whether to apply the model's final norm.

        Returns:
            For each block in order of depth, [B, T, D].
        """
        depth = self.num_layers
        if isinstance(indices, int):
            indices = range(-indices, 0)
        wanted = range(depth) if indices is None else indices
        if not all(-depth <= i < depth for i in wanted):
            raise IndexError(f"indices: the model has {depth} blocks, got {list(wanted)}")
        chosen = {i % depth for i in wanted}
        tokens, now = self._embed(x, None, None)
        taken = []
        for i, block in enumerate(self.blocks[: max(chosen, default=-1) + 1]):
            tokens = self._run(block, tokens, now)
            if i in chosen:
                taken.append(self.norm(tokens) if norm else tokens)
        return taken

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns recomputation of blocks in the backward pass on or off; heads then keep nothing of their own."""
        self.grad_checkpointing = enable
        for module in self.modules():
            if isinstance(module, Attention):
                module.lean = not enable

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of forward and backward for one token of a sequence of ``length`` tokens.

        6 for each weight of a matrix product and 12 H d T for the attention of each layer (PaLM, arXiv 2204.02311,
        appendix B). As there, the scores of all T tokens count, also the masked ones; mixing counts nothing.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6.0 * weights + 12.0 * self.num_layers * self.embed_dim * length

    def _embed(self, tokens: Tensor, padding: Tensor | None, cache: KVCache | None) -> tuple[Tensor, Pass]:
        """The input of the first block, and what all blocks share."""
        if cache is not None and padding is not None:
            raise ValueError("padding: with a cache, give it to the cache")
        past = 0 if cache is None else cache.length
        end = past + tokens.size(1)
        if cache is not None:
            padding, least = cache.padding, cache.least_padding
            if end > cache.capacity:
                raise ValueError(f"cache: it has room for {cache.capacity} tokens, got {end}")
        else:
            least = 0 if padding is None else int(padding.min())
        if end - least > self.context:
            raise UserError(f"tokens: expected at most {self.context} (the model's context), got {end - least}")
        index = torch.arange(past, end, device=tokens.device)
        positions = index[None] if padding is None else (index - padding[:, None]).clamp(min=0)
        x = self.embedding(tokens)
        rotation = None
        if self.positions is not None:
            x = x + self.positions(positions)
        else:
            rotation = (self.rope_cos[positions].unsqueeze(2), self.rope_sin[positions].unsqueeze(2))
        return self.embed_norm(x), _pass(index, positions, padding, cache, rotation)

    def _run(self, block: nn.Module, x: Tensor, now: Pass) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            out: Tensor = checkpoint(block, x, now, use_reentrant=False)
        else:
            out = block(x, now)
        return out


def _pass(
    index: Tensor,
    positions: Tensor,
    padding: Tensor | None,
    cache: KVCache | None,
    rotation: tuple[Tensor, Tensor] | None,
) -> Pass:
    """What the blocks share, for tokens at ``index`` [T] of the padded sequences, ``positions`` [B or 1, T] without."""
    if padding is None and cache is None:
        return Pass(rotation, mask=None, is_causal=True)
    counts = (positions + 1)[:, None, :, None]
    if padding is None:
        assert cache is not None
        if cache.length == 0:
            return Pass(rotation, None, is_causal=True, counts=counts, cache=cache)
        if len(index) == 1:
            return Pass(rotation, None, is_causal=False, counts=counts, cache=cache)
    key = torch.arange(len(index) + (0 if cache is None else cache.length), device=index.device)
    mask = (key <= index[:, None])[None, None]
    valid = None
    if padding is not None:
        first = padding[:, None, None, None]
        # Padding sees itself, so that no row of P is empty.
        mask = mask & (key >= first) | (key == index[:, None])
        valid = index[:, None] >= first
    return Pass(rotation, mask, is_causal=False, counts=counts, valid=valid, cache=cache)


def build_decoder(name: str, heads: Any = 0, *, vocab_size: int, **settings: Any) -> Decoder:
    """Builds a decoder with a head schedule.

    Args:
        name: Preset: tiny, d4 to d32 or postnorm-48.
        heads: Anything that ``HeadSchedule.parse`` reads.
        vocab_size: Number of tokens V.
        **settings: The other fields of ``DecoderSettings``.

    Raises:
        UserError: Unknown preset or setting, values that do not fit together, weights of another model.
    """
    known = [f.name for f in fields(DecoderSettings)]
    for key in settings.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        raise UserError(f"backbone {name}: decoders have no {key!r}" + (f" (did you mean {near[0]}?)" if near else ""))
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise UserError(f"vocab_size: expected a whole number of at least 1, got {vocab_size!r}")
    s = DecoderSettings(name, heads, **settings)
    architecture = resolve(s)
    schedule = HeadSchedule.parse(heads, architecture.depth, architecture.num_heads)
    decoder = Decoder(architecture, schedule, vocab_size)
    if s.weights is not None:
        load_decoder_weights(decoder, s.weights)
    if s.grad_checkpointing:
        decoder.set_grad_checkpointing()
    if s.compile:
        decoder.compile()
    return decoder


def load_decoder_weights(decoder: Decoder, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Loads weights, all of them and no others.

    Args:
        decoder: The model.
        weights: A file (.pth, .pt, .ckpt, .safetensors) or a state dict. Wrapper prefixes are dropped.

    Raises:
        UserError: No such file, not a checkpoint, or tensors that are missing, unexpected or of another shape.
    """
    where = str(weights) if isinstance(weights, str | Path) else "state dict"
    if isinstance(weights, str | Path):
        weights, _ = read_state(Path(weights))
    own = decoder.state_dict()
    state = without_prefixes(weights, own)
    if decoder.architecture.tied and "embedding.weight" in state:
        state.setdefault("head.weight", state["embedding.weight"])
    if missing := [name for name in own if name not in state]:
        raise UserError(f"weights {where}: {len(missing)} of the model's tensors are missing, the first {missing[0]}")
    if unexpected := [name for name in state if name not in own]:
        raise UserError(f"weights {where}: {len(unexpected)} tensors are not the model's, the first {unexpected[0]}")
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"weights {where}: {name} has shape {tuple(tensor.shape)}, the model expects {tuple(own[name].shape)}"
            )
    decoder.load_state_dict(state)
