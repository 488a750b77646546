"""Generation against a loop without cache, its independence of the batch, and its settings."""

import math
from typing import Any

import pytest
import torch

from lapbench.backbones import Decoder, build_decoder
from lapbench.backbones.generation import _sample, generate
from lapbench.errors import UserError

MIXED = [["attention", "laplacian", "shaped", "learned(shaped)"], 2]
PROMPTS = [[5, 9, 2, 7, 30], [1], [60, 3, 3], [8] * 12]


def model_of(heads: Any = MIXED, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    start = {"init": "normal", "init_std": 0.3, "head_std": 0.3}
    return build_decoder(
        "tiny", heads, **{"vocab_size": 61, "depth": 2, "width": 32, "context": 32, **start, **settings}
    )


def flat_model() -> Decoder:
    """All tokens are equally likely."""
    return build_decoder("tiny", vocab_size=1000, depth=1, width=32, context=32)


@torch.no_grad()
def greedy(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_greedy_equals_the_loop_without_cache(num_kv_heads: int) -> None:
    model = model_of(num_kv_heads=num_kv_heads)
    got = generate(model, PROMPTS, max_new_tokens=10, temperature=0)
    assert got == [greedy(model, prompt, 10) for prompt in PROMPTS]


def test_the_context_ends_each_row() -> None:
    model = model_of()
    prompts = [[4], [7] * 31, [9] * 20]
    got = generate(model, prompts, max_new_tokens=1000, temperature=0)
    assert [len(row) for row in got] == [31, 1, 12]
    assert got == [greedy(model, prompt, 32 - len(prompt)) for prompt in prompts]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model = model_of()
    together = generate(model, PROMPTS, max_new_tokens=15, seeds=[3, 4, 5, 6], stop_tokens=range(6))
    for prompt, seed, row in zip(PROMPTS, (3, 4, 5, 6), together, strict=True):
        assert generate(model, [prompt], max_new_tokens=15, seeds=[seed], stop_tokens=range(6)) == [row]
    backwards = generate(model, PROMPTS[::-1], max_new_tokens=15, seeds=[6, 5, 4, 3], stop_tokens=range(6))
    assert backwards == together[::-1]
    assert len({len(row) for row in together}) > 1  # some stopped


def test_a_shorter_answer_is_the_start_of_a_longer_one() -> None:
    model = model_of()
    long = generate(model, PROMPTS[:2], max_new_tokens=20, seeds=[1, 2])
    assert generate(model, PROMPTS[:2], max_new_tokens=6, seeds=[1, 2]) == [row[:6] for row in long]


def test_samples_of_one_prompt_differ_from_the_first_token_on() -> None:
    rows = generate(flat_model(), [[1, 2]] * 10, max_new_tokens=4, seeds=range(10))
    assert len({row[0] for row in rows}) == 10


def test_without_seeds_torchs_generator_decides() -> None:
    model = flat_model()
    torch.manual_seed(1)
    first = generate(model, [[1]] * 2, max_new_tokens=8)
    assert first[0] != first[1]
    assert generate(model, [[1]] * 2, max_new_tokens=8) != first
    torch.manual_seed(1)
    assert generate(model, [[1]] * 2, max_new_tokens=8) == first


def test_stop_tokens_end_a_row_and_are_left_out() -> None:
    model = model_of()
    free = generate(model, PROMPTS, max_new_tokens=12, temperature=0)
    stop = free[0][3]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert generate(model, PROMPTS, max_new_tokens=12, temperature=0, stop_tokens=[stop]) == expected
    assert len(expected[0]) <= 3


def test_finished_rows_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    batches = []
    plain = model.forward_features

    def counted(tokens: torch.Tensor, **others: Any) -> torch.Tensor:
        batches.append(len(tokens))
        return plain(tokens, **others)

    monkeypatch.setattr(model, "forward_features", counted)
    generate(model, [[1] * 30, [1] * 28, [1] * 20], max_new_tokens=100, temperature=0)
    assert batches == [3, 3, 2, 2, *[1] * 8]


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -math.inf]).clamp(min=-1e9)
    draws = torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature, top_k in [(1.0, None), (0.5, None), (2.0, 2), (1.0, 9)]:
        kept = logits.clone()
        if top_k == 2:
            kept[[0, 3, 4]] = -math.inf
        tokens = _sample(logits.expand(20000, -1), temperature, top_k, draws)
        shares = tokens.bincount(minlength=5) / 20000
        torch.testing.assert_close(shares, (kept / temperature).softmax(-1), rtol=0, atol=0.012)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_extreme_draws_never_give_an_impossible_token(draw: float) -> None:
    logits = torch.tensor([[-1e9, 0.3, 0.1, 0.7, -1e9]])
    token = _sample(logits, 1.0, None, torch.tensor([draw], dtype=torch.float64)).item()
    assert token == (1 if draw == 0 else 3)


def test_a_temperature_near_zero_is_greedy() -> None:
    model = model_of()
    cold = generate(model, PROMPTS, max_new_tokens=10, temperature=1e-300, seeds=[0] * 4)
    assert cold == generate(model, PROMPTS, max_new_tokens=10, temperature=0)
    assert cold == generate(model, PROMPTS, max_new_tokens=10, temperature=5.0, top_k=1, seeds=[0] * 4)


def test_nothing_to_do() -> None:
    assert generate(model_of(), [], max_new_tokens=5) == []
    assert generate(model_of(), PROMPTS, max_new_tokens=0) == [[], [], [], []]


def test_a_model_in_training_goes_on_training() -> None:
    """Samples drawn between two steps leave nothing behind that gradients cannot pass."""
    model = model_of().train()
    generate(model, PROMPTS, max_new_tokens=3)
    assert model.training
    torch.autograd.backward(model(torch.tensor([[1, 2, 3]])).square().sum())
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, r"prompt 1: expected 1 to 31 tokens \(the model's context is 32\), got 0"),
        ({"prompts": [[1] * 32]}, "prompt 0: expected 1 to 31 tokens .* got 32"),
        ({"prompts": [[1, 61]]}, r"prompt 0: expected tokens in 0\.\.60, got 61"),
        ({"prompts": [[-1, 2]]}, r"prompt 0: expected tokens in 0\.\.60, got -1"),
        ({"temperature": -0.5}, "temperature: expected a finite number of at least 0, got -0.5"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"top_k": 0}, "top_k: expected at least 1, got 0"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected at least 0, got -1"),
        ({"seeds": [1, 2]}, "seeds: expected one for each of 1 prompts, got 2"),
    ],
)
def test_user_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(model_of(), **{"prompts": [[1]], "max_new_tokens": 4, **arguments})


def test_a_diverged_model_is_named() -> None:
    model = model_of()
    model.embedding.weight.data[3] = math.nan
    with pytest.raises(UserError, match="the model's logits are not finite"):
        generate(model, [[1], [3]], max_new_tokens=4)
