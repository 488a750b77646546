"""Decoders as Hugging Face checkpoints of ``NanoChatForCausalLM`` and back; needs ``transformers``."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from lapbench.backbones.decoder import Decoder, build_decoder, load_decoder_weights
from lapbench.backbones.decoder_layers import EPS
from lapbench.errors import UserError

# What NanoChatForCausalLM computes; depth, widths, heads, context, rope_base, softcap and tied are its settings.
_NANOCHAT: dict[str, Any] = {
    "norm": "rms",
    "norm_position": "pre",
    "mlp": "relu2",
    "positions": "rope",
    "qk_norm": True,
    "embed_norm": True,
}
_BLOCK = re.compile(r"blocks\.([0-9]+)\.(attn|mlp)\.(.+)")


def export_huggingface(decoder: Decoder, tokenizer: Path | None, folder: Path) -> None:
    """Writes config.json, model.safetensors and, where given, tokenizer.json.

    ``transformers.NanoChatForCausalLM.from_pretrained(folder)`` then gives the same logits.

    Args:
        decoder: The model.
        tokenizer: A tokenizer.json of its vocabulary.
        folder: Where to write; made where it is missing.

    Raises:
        UserError: ``transformers`` is not installed, a head is not attention, or a setting has no equal there.
    """
    a = decoder.architecture
    for i, kinds in enumerate(decoder.schedule.layers):
        for kind in kinds:
            if kind.spec != "attention":
                raise UserError(f"export: NanoChat has attention heads only; layer {i} has one of kind {kind.spec}")
    for key, value in _NANOCHAT.items():
        if getattr(a, key) != value:
            raise UserError(f"export: NanoChat has {key} {value}, this decoder {getattr(a, key)}")
    config = _config_class()(
        vocab_size=decoder.vocab_size,
        hidden_size=a.width,
        intermediate_size=a.mlp_width,
        num_hidden_layers=a.depth,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        max_position_embeddings=a.context,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": float(a.rope_base)},
        final_logit_softcapping=a.softcap or None,
        tie_word_embeddings=a.tied,
        **_special_tokens(tokenizer),
    )
    config.architectures = ["NanoChatForCausalLM"]
    config.dtype = str(decoder.embedding.weight.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    state = {_their_name(name): t.detach().contiguous() for name, t in decoder.state_dict().items()}
    if a.tied:
        del state["lm_head.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    config.save_pretrained(folder)


def import_huggingface(folder: Path) -> Decoder:
    """Reads a checkpoint of ``NanoChatForCausalLM``: config.json and model.safetensors, in one file or in shards.

    Raises:
        UserError: ``transformers`` is not installed, files are missing, another model, or settings that decoders lack.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"import: expected a Hugging Face folder with config.json, {folder} has none")
    try:
        declared = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"import: {path} is not JSON ({error})") from error
    kind = declared.get("model_type") if isinstance(declared, dict) else None
    if kind != "nanochat":
        raise UserError(f"import: {path}: expected model_type nanochat, got {kind!r}")
    config = _config_class().from_pretrained(folder)
    rope = config.rope_parameters
    for key, value, expected in (
        ("hidden_act", config.hidden_act, "relu2"),
        ("attention_bias", config.attention_bias, False),
        ("rope_type", rope["rope_type"], "default"),
        ("rms_norm_eps", config.rms_norm_eps, EPS),
    ):
        if value != expected:
            raise UserError(f"import: {path}: expected {key} {expected}, got {value}")
    decoder = build_decoder(
        "d4",
        vocab_size=config.vocab_size,
        depth=config.num_hidden_layers,
        width=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        context=config.max_position_embeddings,
        mlp_width=config.intermediate_size,
        rope_base=float(rope["rope_theta"]),
        softcap=config.final_logit_softcapping or 0.0,
        tied=config.tie_word_embeddings,
    )
    state = _read_tensors(folder)
    dtypes = {t.dtype for t in state.values()}
    if len(dtypes) == 1:
        decoder.to(dtypes.pop())
    load_decoder_weights(decoder, {_our_name(name): t for name, t in state.items()})
    return decoder


def _config_class() -> Any:
    try:
        from transformers import NanoChatConfig
    except ImportError as error:
        raise UserError(
            f"Hugging Face checkpoints need transformers with NanoChat (pip install 'transformers>=5'): {error}"
        ) from error
    return NanoChatConfig


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise UserError(f"import: expected model.safetensors in {folder}, found none")
    try:
        parts = [safetensors.torch.load_file(path) for path in paths]
    except safetensors.SafetensorError as error:
        raise UserError(f"import: the weights in {folder} are damaged ({error})") from error
    return {name: t for part in parts for name, t in part.items()}


def _special_tokens(tokenizer: Path | None) -> dict[str, int | None]:
    """Ids of the tokens that begin a document and end a turn, where the tokenizer has them."""
    added: list[dict[str, Any]] = []
    if tokenizer is not None:
        if not tokenizer.is_file():
            raise UserError(f"export: expected a tokenizer.json, {tokenizer} is no file")
        added = json.loads(tokenizer.read_text()).get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    return {
        "bos_token_id": ids.get("<|bos|>"),
        "eos_token_id": ids.get("<|assistant_end|>"),
        "pad_token_id": None,  # NanoChatConfig's default would zero that token's embedding
    }


def _their_name(name: str) -> str:
    if match := _BLOCK.fullmatch(name):
        part = "self_attn" if match[2] == "attn" else "mlp"
        return f"model.layers.{match[1]}.{part}.{match[3]}"
    return {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}[name]


def _our_name(name: str) -> str:
    """The decoder's name of a tensor; one that it cannot have stays as it is, to be refused by that name."""
    if match := re.fullmatch(r"model\.layers\.([0-9]+)\.(self_attn|mlp)\.(.+)", name):
        part = "attn" if match[2] == "self_attn" else "mlp"
        return f"blocks.{match[1]}.{part}.{match[3]}"
    return {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.weight"}.get(name, name)
