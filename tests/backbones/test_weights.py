"""Weights in and out: timm state dicts, files, wrapper prefixes, position embeddings of other sizes, hostile files."""

import argparse
import logging
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm.layers
import torch
from torch import Tensor, nn

from lapbench.backbones import VisionSettings, build_backbone
from lapbench.backbones.weights import load_weights
from lapbench.errors import UserError

VIT, DEIT3, ROPE, EVA = (
    "vit_tiny_patch16_224",  # a position for the class token
    "deit3_small_patch16_224",  # none
    "vit_small_patch16_rope_ape_224",
    "eva02_tiny_patch14_224",
)


def assert_equal(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert list(model.state_dict()) == list(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_timm_weights_go_in_and_out(zoo: Any, family: str) -> None:
    stock = zoo.stock(family, seed=7)
    model = zoo.mixed(family, "1S+2L")
    report = load_weights(model, stock.state_dict())
    assert report.matched == list(stock.state_dict())
    assert report.missing == report.unexpected == []
    assert_equal(model, stock.state_dict())
    other = zoo.stock(family, seed=8)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other.eval()(zoo.images()), stock.eval()(zoo.images()))


def test_learned_coefficients_stay_or_come_along(zoo: Any) -> None:
    name = "blocks.0.attn.head_coefficients"
    learned = zoo.mixed(DEIT3, ["1TL", 0, 0])
    report = load_weights(learned, zoo.stock(DEIT3).state_dict())
    assert report.missing == [name]
    with torch.no_grad():
        learned.get_parameter(name).fill_(0.3)
    again = zoo.mixed(DEIT3, ["1TL", 0, 0])
    load_weights(again, learned.state_dict())
    assert again.get_parameter(name).tolist() == [[pytest.approx(0.3)] * 3]
    assert load_weights(zoo.mixed(DEIT3, 1), learned.state_dict()).unexpected == [name]
    with pytest.raises(UserError, match=r"head_coefficients has shape \(1, 3\), the model expects \(2, 3\)"):
        load_weights(zoo.mixed(DEIT3, ["2TL", 0, 0]), learned.state_dict())


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "backbone."])
def test_wrapper_prefixes(zoo: Any, prefix: str) -> None:
    state = zoo.stock(ROPE, seed=7).state_dict()
    model = zoo.mixed(ROPE, 2)
    report = load_weights(model, {prefix + name: tensor for name, tensor in state.items()})
    assert report.matched == list(state)
    assert_equal(model, state)


def lightning(state: dict[str, Tensor], settings: VisionSettings) -> dict[str, Any]:
    """The parts of a lapbench checkpoint that matter here."""
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"backbone.{name}": tensor for name, tensor in state.items()},
        "optimizer_states": [{"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "hyper_parameters": {"backbone": asdict(settings), "num_classes": 5},
    }


@pytest.mark.parametrize(
    "kind", ["timm.pth", "namespace.pth", "ema.pth", "model.safetensors", "last.ckpt", "compiled.ckpt"]
)
def test_files(zoo: Any, tmp_path: Path, kind: str) -> None:
    state = zoo.stock(DEIT3, seed=7).state_dict()
    path = tmp_path / kind
    if kind == "timm.pth":
        torch.save(state, path)
    elif kind == "namespace.pth":  # of timm's training script
        torch.save({"epoch": 1, "arch": DEIT3, "args": argparse.Namespace(lr=0.1), "state_dict": state}, path)
    elif kind == "ema.pth":
        torch.save({"state_dict": zoo.stock(DEIT3, seed=9).state_dict(), "state_dict_ema": state}, path)
    elif kind == "model.safetensors":
        safetensors.torch.save_file(state, path)
    else:
        prefix = "_orig_mod." if kind == "compiled.ckpt" else ""
        torch.save(lightning({prefix + n: t for n, t in state.items()}, VisionSettings(DEIT3)), path)
    assert_equal(zoo.mixed(DEIT3, 2, weights=str(path)), state)
    model = zoo.mixed(DEIT3, 2)
    assert load_weights(model, path).matched == list(state)


def test_the_count_is_logged(zoo: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = zoo.stock(VIT).state_dict()
    del state["norm.weight"]
    with caplog.at_level(logging.INFO):
        load_weights(zoo.mixed(VIT, 2), {**state, "extra": torch.zeros(1)})
    assert f"{len(state)} of {len(state) + 1} tensors loaded" in caplog.text
    assert "left at their start ['norm.weight']; not used ['extra']" in caplog.text


def test_nothing_in_common_is_an_error(zoo: Any) -> None:
    state = {"layer1.conv.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2)}
    with pytest.raises(UserError, match=r"none of its 2 tensors .*first ones: layer1.conv.weight, fc.bias; expected"):
        load_weights(zoo.mixed(VIT, 2), state)
    with pytest.raises(UserError, match="none of its 0 tensors"):
        load_weights(zoo.mixed(VIT, 2), {})


@pytest.mark.parametrize("name", [VIT, EVA, "deit_tiny_distilled_patch16_224"])
def test_a_classifier_of_other_classes_is_left_at_its_start(zoo: Any, name: str) -> None:
    state = zoo.stock(name, seed=7, num_classes=11).state_dict()
    model = zoo.mixed(name, 2)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    report = load_weights(model, state)
    heads = [n for n in state if n.startswith("head")]
    assert report.missing == report.unexpected == heads
    for n, tensor in model.state_dict().items():
        assert torch.equal(tensor, (start if n in heads else state)[n]), n
    # and one that the model does not have at all
    assert load_weights(zoo.mixed(name, 2, num_classes=0), state).unexpected == heads


def test_other_shapes_are_errors_and_change_nothing(zoo: Any) -> None:
    model = zoo.mixed(VIT, 2)
    start = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UserError, match=r"has shape \(1, 1, 16\), the model expects \(1, 1, 32\)"):
        load_weights(model, zoo.stock(VIT, embed_dim=16).state_dict())
    with pytest.raises(UserError, match=r"blocks.0.mlp.fc1.weight has shape"):
        load_weights(model, zoo.stock(VIT, mlp_ratio=2).state_dict())
    assert_equal(model, start)


class TestPositionEmbeddings:
    """Grids are of 4 px patches: [48, 80] is 12 x 20."""

    @staticmethod
    def prefix(model: nn.Module) -> int:
        return 0 if model.no_embed_class else int(model.num_prefix_tokens)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", [VIT, DEIT3, ROPE, EVA])
    @pytest.mark.parametrize("size", [16, 61, 115, 122, (48, 80)], ids=str)
    def test_the_same_size_is_the_identity(self, zoo: Any, name: str, size: Any) -> None:
        state = zoo.stock(name, seed=7, img_size=size).state_dict()
        model = zoo.mixed(name, 2, img_size=size)
        load_weights(model, state)
        assert_equal(model, state)

    @pytest.mark.parametrize("name", [VIT, DEIT3, ROPE, EVA])
    @pytest.mark.parametrize("size", [8, 32, 61, 115, 122, (48, 80), (8, 32)], ids=str)
    def test_other_sizes_are_interpolated(self, zoo: Any, name: str, size: Any) -> None:
        source = zoo.stock(name, seed=7, img_size=16)
        model = zoo.mixed(name, 2, img_size=size)
        load_weights(model, source.state_dict())
        p, old, new = self.prefix(model), source.pos_embed, model.pos_embed
        assert torch.equal(new[:, :p], old[:, :p])
        height, width = (size, size) if isinstance(size, int) else size
        grid = (height // 4, width // 4)
        assert new.shape[1] == p + grid[0] * grid[1]
        image = old[:, p:].reshape(1, 4, 4, 32).permute(0, 3, 1, 2)
        resized = nn.functional.interpolate(image, size=grid, mode="bicubic", antialias=True)
        torch.testing.assert_close(new[:, p:], resized.permute(0, 2, 3, 1).reshape(1, -1, 32))

    def test_a_constant_stays_and_a_slope_keeps_its_direction(self, zoo: Any) -> None:
        """Rows and columns are not mixed up: an embedding that grows along the rows only still does."""
        state = zoo.stock(VIT, img_size=16).state_dict()
        rows = torch.arange(4.0)[:, None].expand(4, 4).reshape(1, 16, 1).expand(1, 16, 32)
        state["pos_embed"] = torch.cat([torch.full((1, 1, 32), 9.0), rows], dim=1)
        model = zoo.mixed(VIT, 2, img_size=(48, 80))
        load_weights(model, state)
        grid = model.pos_embed[0, 1:, 0].reshape(12, 20)
        assert torch.equal(model.pos_embed[0, 0], torch.full((32,), 9.0))
        torch.testing.assert_close(grid, grid[:, :1].expand(12, 20))
        assert (grid[1:, 0] > grid[:-1, 0] - 1e-6).all()
        assert grid[-1, 0] - grid[0, 0] > 2.5

    @pytest.mark.parametrize("name", [VIT, DEIT3, ROPE, EVA])
    @pytest.mark.parametrize(("source", "target"), [((48, 80), 16), ((28, 112), (28, 112)), ((28, 112), 56)], ids=str)
    def test_lapbench_checkpoints_know_their_grid(
        self, zoo: Any, tmp_path: Path, name: str, source: tuple[int, int], target: Any
    ) -> None:
        """7 x 28 has as many positions as 14 x 14, which timm would take it for."""
        state = zoo.stock(name, seed=7, img_size=source).state_dict()
        settings = VisionSettings(name, options={"img_size": list(source)})
        torch.save(lightning(state, settings), tmp_path / "last.ckpt")
        model = zoo.mixed(name, 2, img_size=target, weights=str(tmp_path / "last.ckpt"))
        if source == target:
            assert torch.equal(model.pos_embed, state["pos_embed"])
            return
        exact = timm.layers.resample_abs_pos_embed(
            state["pos_embed"],
            new_size=[target // 4] * 2,
            old_size=[side // 4 for side in source],
            num_prefix_tokens=self.prefix(model),
        )
        assert torch.equal(model.pos_embed, exact)
        again = zoo.mixed(name, 2, img_size=target)
        load_weights(again, state, grid=(source[0] // 4, source[1] // 4))
        assert torch.equal(again.pos_embed, exact)

    def test_an_unknown_grid_is_an_error(self, zoo: Any) -> None:
        state = zoo.stock(VIT, img_size=(48, 80)).state_dict()
        with pytest.raises(
            UserError, match="pos_embed has 240 positions besides 1 of prefix tokens, expected 4 x 4 or"
        ):
            load_weights(zoo.mixed(VIT, 2), state)
        with pytest.raises(UserError, match=r"pos_embed has 240 positions .*, expected 3 x 4"):
            load_weights(zoo.mixed(VIT, 2), state, grid=(3, 4))

    def test_class_positions_that_the_model_does_not_have(self, zoo: Any) -> None:
        state = zoo.stock(VIT, seed=7).state_dict()
        with pytest.raises(UserError, match="pos_embed has 17 positions besides 0 of prefix tokens"):
            load_weights(zoo.mixed(VIT, 2, no_embed_class=True), state)

    def test_a_model_without_position_embeddings_leaves_them_out(self, zoo: Any) -> None:
        name = "vit_small_patch16_rope_mixed_224"
        state = {**zoo.stock(name).state_dict(), "pos_embed": torch.zeros(1, 17, 32)}
        assert load_weights(zoo.mixed(name, 2), state).unexpected == ["pos_embed"]


def test_patch_embeddings_are_resized(zoo: Any) -> None:
    state = zoo.stock(VIT, seed=7, patch_size=8, img_size=32).state_dict()
    model = zoo.mixed(VIT, 2)
    load_weights(model, state)
    exact = timm.layers.resample_patch_embed(state["patch_embed.proj.weight"], [4, 4], antialias=True)
    torch.testing.assert_close(model.patch_embed.proj.weight, exact)
    assert torch.equal(model.pos_embed, state["pos_embed"])


def test_original_dinov2_weights(zoo: Any) -> None:
    """Meta's names, and positions for the class token only, are timm's to convert."""
    name = "vit_small_patch14_reg4_dinov2"
    stock = zoo.stock(name, seed=7).state_dict()
    renamed = {n.replace("reg_token", "register_tokens"): t for n, t in stock.items() if not n.startswith("head")}
    positions = torch.cat([torch.full((1, 1, 32), 0.5), stock["pos_embed"]], dim=1)
    original = {**renamed, "mask_token": torch.zeros(1, 32), "pos_embed": positions}
    model = zoo.mixed(name, 2)
    report = load_weights(model, original)
    assert report.missing == ["head.weight", "head.bias"]
    assert torch.equal(model.reg_token, stock["reg_token"])
    assert torch.equal(model.pos_embed, stock["pos_embed"])
    torch.testing.assert_close(model.cls_token, stock["cls_token"] + 0.5)


class Canary:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class TestFilesThatAreNoCheckpoints:
    def refusal(self, path: Path) -> str:
        with pytest.raises(UserError) as caught:
            build_backbone(VIT, 0, img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=4, weights=str(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("suffix", [".pth", ".ckpt", ".bin", ".safetensors", ""])
    @pytest.mark.parametrize("how", ["torch", "pickle"])
    def test_nothing_in_them_is_run(self, tmp_path: Path, suffix: str, how: str) -> None:
        canary, path = tmp_path / "canary", tmp_path / f"weights{suffix}"
        content = {"state_dict": {"norm.weight": torch.zeros(32)}, "args": Canary(canary)}
        if how == "torch":
            torch.save(content, path)
        else:
            path.write_bytes(pickle.dumps(content))
        assert "not a checkpoint that can be read safely" in self.refusal(path)
        assert not canary.exists()
        pickle.loads(pickle.dumps(Canary(canary)))
        assert canary.exists()  # the canary sings where unpickling runs it

    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    @pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 truncated"])
    def test_garbage(self, tmp_path: Path, suffix: str, content: bytes) -> None:
        path = tmp_path / f"weights{suffix}"
        path.write_bytes(content)
        assert "not a checkpoint that can be read safely" in self.refusal(path)

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.pth"
        torch.save({"norm.weight": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:-500])
        self.refusal(path)

    def test_missing_files_and_folders(self, tmp_path: Path) -> None:
        assert "expected a file" in self.refusal(tmp_path / "nothing.pth")
        assert "expected a file" in self.refusal(tmp_path)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ([torch.zeros(2)], "expected a state dict, got list"),
            (torch.zeros(2), "expected a state dict, got Tensor"),
            ({"epoch": 3}, "none of its 0 tensors"),
            ({"state_dict": {}}, "none of its 0 tensors"),
            ({0: torch.zeros(2)}, "none of its 0 tensors"),
        ],
        ids=str,
    )
    def test_other_contents(self, tmp_path: Path, content: Any, said: str) -> None:
        path = tmp_path / "weights.pth"
        torch.save(content, path)
        assert said in self.refusal(path)
