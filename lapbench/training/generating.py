"""What ``lapbench generate`` does between its arguments and its output."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lapbench.backbones.decoder import load_decoder_weights
from lapbench.backbones.generation import generate
from lapbench.config_files import load_yaml
from lapbench.datamodules.conversations import render_prompt
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import ArgumentParser, UserError, natural, positive
from lapbench.training.existing_run import run_arguments
from lapbench.training.parser import CLI
from lapbench.training.run_folder import CONFIG


def parse_request(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of ``lapbench generate``.

    Raises:
        UserError: No run of a language model, no text, numbers out of range.
    """
    parser = ArgumentParser(
        prog="lapbench generate", description="Let the language model of a run continue texts, or answer questions."
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    parser.add_argument("--prompt", metavar="TEXT", action="append", required=True, help="text; may be given again")
    parser.add_argument("--max-tokens", metavar="N", type=positive, default=128, help="most new tokens (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", metavar="K", type=positive, default=50, help="likeliest tokens to draw from (50)")
    parser.add_argument("--seed", type=natural, default=0, help="of the first text, counted on for others (default: 0)")
    parser.add_argument("--chat", action="store_true", help="the texts are questions of a user to answer")
    parser.add_argument("--ckpt", metavar="CKPT", help="last, best or a file (default: the one that the run declares)")
    request = parser.parse_args(argv)
    for text in request.prompt:
        if not text.strip():
            raise UserError(f"--prompt: expected a text, got {text!r}")
    if not request.temperature >= 0:
        raise UserError(f"--temperature: expected a number of at least 0, got {request.temperature}")
    return request


def cli_arguments(request: argparse.Namespace) -> list[str]:
    """The run's own configuration as arguments of ``CLI``.

    Raises:
        UserError: The folder holds no run, or one of another task.
    """
    arguments = run_arguments(request.run)
    task = str(load_yaml(request.run / CONFIG)["model"]["class_path"]).rpartition(".")[2]
    if task != "LanguageModeling":
        raise UserError(f"{request.run}: expected a run of LanguageModeling, got one of {task}")
    return arguments


def written(cli: CLI, request: argparse.Namespace) -> list[str]:
    """What the model writes: each text with its continuation, or the answers alone with ``--chat``.

    Raises:
        UserError: No such checkpoint, one of another model, a text that is longer than the model's context.
    """
    backbone: Any = cli.model.backbone
    checkpoint = cli.run_folder.checkpoint_to_score(request.ckpt)
    assert checkpoint is not None  # as there is a folder
    load_decoder_weights(backbone, checkpoint)
    tokenizer: Tokenizer = cli.datamodule.load_tokenizer()
    if tokenizer.vocab_size != backbone.vocab_size:
        raise UserError(
            f"{tokenizer.path} has {tokenizer.vocab_size} tokens, the model in {request.run} {backbone.vocab_size}"
        )
    if request.chat:
        prompts = [render_prompt([{"role": "user", "content": text}], tokenizer) for text in request.prompt]
    else:
        prompts = [[tokenizer.bos, *tokens] for tokens in tokenizer.encode_batch(request.prompt)]
    backbone.to(cli.trainer.strategy.root_device).eval()
    with cli.trainer.precision_plugin.forward_context():
        answers = generate(
            backbone,
            prompts,
            max_new_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            stop_tokens=(tokenizer.bos, tokenizer.special["<|assistant_end|>"]),
            seeds=range(request.seed, request.seed + len(prompts)),
        )
    # Decoded together, so that a character whose bytes lie on both sides comes out whole.
    return [
        tokenizer.decode(tokens if request.chat else [*prompt[1:], *tokens])
        for prompt, tokens in zip(prompts, answers, strict=True)
    ]
