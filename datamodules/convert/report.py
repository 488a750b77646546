"""The closing lines of ``lapbench data``: what is where, what was left out, and the command that uses it."""

import shlex

from lapbench.datamodules.convert import ade20k, shapes
from lapbench.datamodules.convert.chat import Converted
from lapbench.datamodules.convert.pipeline import DAMAGED
from lapbench.datamodules.convert.token_shards import EMPTY
from lapbench.datamodules.convert.tokenizer import Trained
from lapbench.datamodules.layout import Layout
from lapbench.datamodules.manifest import Manifest
from lapbench.datamodules.token_manifest import TokenManifest

# The config that trains on each data set.
CONFIGS = {
    **{name: f"supervised/{name}" for name in ("digits", "cifar10", "cifar100", "imagenet")},
    shapes.DATASET: "ssl/shapes",
    "pydocs": "language/pydocs",
    "fineweb-edu": "language/d20_pretrain",
}


Result = Manifest | TokenManifest | Trained | Converted | Layout | shapes.Drawn


def report(result: Result, already: bool, out: str) -> str:
    """The lines on what a command made in ``out``, or found there."""
    if isinstance(result, shapes.Drawn):
        images, following = report(result.images, already, out).splitlines()
        lines = [images, _pairs(result.scenes, f"{out}/{shapes.SCENES}"), following]
    elif isinstance(result, Trained):
        lines = _tokenizer(result, out)
    elif isinstance(result, Converted):
        lines = _conversations(result, out)
    elif isinstance(result, Layout):
        lines = _masks(result, out)
        lines[0] = "already converted: " * already + lines[0]
    else:
        lines = _images(result) if isinstance(result, Manifest) else _tokens(result)
        lines[0] = f"{'already converted: ' * already}{result.dataset}: {lines[0]} in {out}"
        unknown = "supervised/CONFIG" if isinstance(result, Manifest) else "language/CONFIG"
        config = CONFIGS.get(result.dataset, unknown)
        lines.append(f"next: lapbench fit --config {config} --data.init_args.data_dir {shlex.quote(out)}")
    return "\n".join(lines) + "\n"


def _images(manifest: Manifest) -> list[str]:
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    images = " + ".join(f"{manifest.samples(split):,} {split}" for split in manifest.splits)
    size = sum(shard.bytes for shard in shards)
    lines = [f"{images} images of {manifest.num_classes} classes in {_files(len(shards), size)}"]
    if damaged := manifest.source.get(DAMAGED):
        lines.append(f"damaged images left out: {len(damaged)}, listed in the manifest; the first is {damaged[0]}")
    return lines


def _tokens(manifest: TokenManifest) -> list[str]:
    shards = [shard for shards in manifest.splits.values() for shard in shards]
    tokens = " + ".join(f"{manifest.tokens(split):,} {split}" for split in manifest.splits)
    documents, text = (sum(getattr(shard, name) for shard in shards) for name in ("documents", "text_bytes"))
    lines = [
        f"{tokens} tokens of {documents:,} documents ({text:,} bytes of text, "
        f"{text / (sum(shard.tokens for shard in shards) - documents):.2f} a token) in "
        f"{_files(len(shards), sum(shard.bytes for shard in shards))}"
    ]
    if empty := manifest.source.get(EMPTY):
        lines.append(f"empty documents left out: {' + '.join(f'{count:,} {split}' for split, count in empty.items())}")
    return lines


def _tokenizer(trained: Trained, out: str) -> list[str]:
    return [
        f"tokenizer of {trained.tokenizer.vocab_size:,} tokens, trained on {trained.characters:,} characters of "
        f"{trained.documents:,} documents ({trained.bytes_per_token:.2f} bytes a token on the first of them), in {out}",
        f"next: lapbench data fineweb-edu --source FILES --tokenizer {shlex.quote(out)} --out data/fineweb-edu",
    ]


def _conversations(converted: Converted, out: str) -> list[str]:
    lines = [
        f"{converted.dataset}: {converted.conversations:,} conversations ({converted.bytes / 1e6:,.1f} MB) in {out}"
    ]
    if converted.invalid:
        lines.append(f"invalid rows left out: {len(converted.invalid):,}; the first is {converted.invalid[0]}")
    return [*lines, f"next: make {out} one of data.init_args.sources, as in the config language/d20_midtrain"]


def _pairs(layout: Layout, out: str) -> str:
    images = " + ".join(f"{count:,} {split}" for split, count in layout.images.items())
    return f"{layout.dataset}: {images} images with masks of {layout.num_classes} classes in {out}"


def _masks(layout: Layout, out: str) -> list[str]:
    lines = [_pairs(layout, out)]
    if layout.images != ade20k.IMAGES:
        whole = " + ".join(f"{count:,}" for count in ade20k.IMAGES.values())
        lines.append(f"this is not the whole benchmark, which has {whole} images")
    config = "segmentation/ade20k_linear"
    return [*lines, f"next: lapbench fit --config {config} --data.init_args.data_dir {shlex.quote(out)}"]


def _files(shards: int, size: int) -> str:
    return f"{shards} shard{'s' * (shards != 1)} ({size / 1e6:,.1f} MB)"
