"""Logits of decoders and of ``NanoChatForCausalLM``, in both directions."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lapbench.backbones import Decoder, build_decoder
from lapbench.backbones.huggingface import export_huggingface, import_huggingface
from lapbench.errors import UserError

SMALL: dict[str, Any] = {"vocab_size": 61, "depth": 2, "width": 32, "context": 32}
TOKENS = torch.randint(61, (3, 24), generator=torch.Generator().manual_seed(1))
VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_kv_heads": 2},
    {"tied": True, "rope_base": 500.0, "softcap": 0.0, "mlp_width": 48},
]


def model_of(heads: Any = 0, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    start = {"init": "normal", "init_std": 0.2, "head_std": 0.2}
    return build_decoder("tiny", heads, **{**SMALL, **start, **settings})


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@torch.no_grad()
def test_exported_models_give_the_same_logits(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import NanoChatForCausalLM

    model = model_of(**settings)
    export_huggingface(model, None, tmp_path / "deep" / "folder")
    theirs, info = NanoChatForCausalLM.from_pretrained(tmp_path / "deep" / "folder", output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(model(TOKENS), theirs.eval()(TOKENS).logits, rtol=0, atol=1e-5)
    assert theirs.config.eos_token_id is None
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
@torch.no_grad()
def test_imported_models_give_the_same_logits(settings: dict[str, Any], shard: str, tmp_path: Path) -> None:
    from transformers import NanoChatConfig, NanoChatForCausalLM

    torch.manual_seed(0)
    config = NanoChatConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=settings.get("mlp_width", 128),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=settings.get("num_kv_heads"),
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": settings.get("rope_base", 10000.0)},
        final_logit_softcapping=settings.get("softcap", 15.0) or None,
        tie_word_embeddings=settings.get("tied", False),
        initializer_range=0.3,
    )
    theirs = NanoChatForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = import_huggingface(tmp_path)
    logits = model(TOKENS)
    torch.testing.assert_close(logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert logits.std() > 0.1


def test_there_and_back(tmp_path: Path) -> None:
    model = model_of(num_kv_heads=2).bfloat16()
    export_huggingface(model, None, tmp_path)
    back = import_huggingface(tmp_path)
    assert back.state_dict().keys() == model.state_dict().keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    tokens = [{"id": 50, "content": "<|bos|>"}, {"id": 54, "content": "<|assistant_end|>"}]
    tokenizer = tmp_path / "mine.json"
    tokenizer.write_text(json.dumps({"added_tokens": tokens}))
    export_huggingface(model_of(), tokenizer, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (50, 54)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == tokenizer.read_text()
    with pytest.raises(UserError, match=r"expected a tokenizer\.json"):
        export_huggingface(model_of(), tmp_path / "none.json", tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": "1L@last1"}, "NanoChat has attention heads only; layer 1 has one of kind laplacian"),
        ({"norm": "layer"}, "NanoChat has norm rms, this decoder layer"),
        ({"norm_position": "post"}, "NanoChat has norm_position pre, this decoder post"),
        ({"mlp": "swiglu"}, "NanoChat has mlp relu2, this decoder swiglu"),
        ({"positions": "learned"}, "NanoChat has positions rope, this decoder learned"),
        ({"qk_norm": False}, "NanoChat has qk_norm True, this decoder False"),
        ({"embed_norm": False}, "NanoChat has embed_norm True, this decoder False"),
    ],
)
def test_what_does_not_export(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        export_huggingface(model_of(**settings), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_does_not_import(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a Hugging Face folder with config\.json"):
        import_huggingface(tmp_path)
    export_huggingface(model_of(), None, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"model_type": "llama"}, "expected model_type nanochat, got 'llama'"),
        ({"hidden_act": "gelu"}, "expected hidden_act relu2, got gelu"),
        ({"rms_norm_eps": 1e-3}, "expected rms_norm_eps 1e-06, got 0.001"),
        ({"num_hidden_layers": 3}, r"6 of the model's tensors are missing, the first blocks\.2\."),
        ({"hidden_size": 64}, r"shape \(61, 32\), the model expects \(61, 64\)"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            import_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        import_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(UserError, match="are damaged"):
        import_huggingface(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model\.safetensors"):
        import_huggingface(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="need transformers with NanoChat"):
        export_huggingface(model_of(), None, tmp_path)
