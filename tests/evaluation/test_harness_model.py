"""The decoder as a model of the harness: likelihoods against hand-computed ones, truncation, generation, processes."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from lapbench.backbones import Decoder, build_decoder
from lapbench.backbones.generation import generate
from lapbench.datamodules.conversations import render_prompt
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.evaluation.answers import Question, Writer
from lapbench.evaluation.calculator import calculate
from lapbench.evaluation.harness_model import HarnessModel
from lapbench.evaluation.processes import Processes

CONTEXT = 24
WORDS = "the cat sat on the mat and the dog sat on the log; Answer: A B C D\n" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer([WORDS], 280, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Decoder:
    """Random weights, the soft cap and two kinds of heads among them."""
    torch.manual_seed(0)
    decoder = build_decoder(
        "tiny", "1L+1D0.5", vocab_size=tokenizer.vocab_size, depth=2, width=32, num_heads=2, context=CONTEXT
    )
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return decoder.eval()


@pytest.fixture
def harness(model: Decoder, tokenizer: Tokenizer) -> Callable[..., HarnessModel]:
    return lambda **settings: HarnessModel(model, tokenizer, **{"batch_size": 3, **settings})


def request(kind: Any, *arguments: Any, document: int = 0) -> Instance:
    return Instance(kind, {}, arguments, 0, ("task", document, 1))


def by_hand(model: Decoder, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One forward pass for each token."""
    total, greedy = 0.0, True
    for i, token in enumerate(continuation):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation[:i]]))[0, -1].double()
        total += float(logits[token] - torch.logsumexp(logits, 0))
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


def assert_close(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_log_likelihoods_are_those_computed_by_hand(
    harness: Callable[..., HarnessModel], model: Decoder, tokenizer: Tokenizer
) -> None:
    pairs = [
        ("the cat", " sat on"),
        ("the cat", " mat"),
        ("", "the dog"),
        ("Answer:", " A"),
        ("Answer:", " B"),
        ("the cat", " sat on"),
        ("the cat sat ", "on"),  # the blank goes to the continuation, as in the harness
    ]
    expected = []
    for context, continuation in pairs:
        kept = context.rstrip()
        whole = [tokenizer.bos, *tokenizer.encode(context + continuation)]
        prefix = [tokenizer.bos, *tokenizer.encode(kept)]
        expected.append(by_hand(model, prefix, whole[len(prefix) :]))
    lm = harness()
    assert_close(lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs]), expected)
    assert lm.truncated == 0
    # What greedy decoding writes is greedy.
    best = int(model(torch.tensor([[tokenizer.bos]]))[0, -1].argmax())
    text = tokenizer.decode([best])
    if tokenizer.encode(text) == [best]:
        assert lm.loglikelihood([request("loglikelihood", "", text)])[0][1]


def test_equal_inputs_share_a_forward_pass(
    harness: Callable[..., HarnessModel], model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    features = model.forward_features
    monkeypatch.setattr(model, "forward_features", lambda tokens: rows.append(len(tokens)) or features(tokens))
    requests = [request("loglikelihood", f"{text} Answer:", c) for text in ("the cat", "a dog") for c in "ABCD"]
    harness(separate=True).loglikelihood(requests)
    assert rows == [2]


def test_chat_contexts_are_a_users_turn(
    harness: Callable[..., HarnessModel], model: Decoder, tokenizer: Tokenizer
) -> None:
    prompt = render_prompt([{"role": "user", "content": "the <|bos|>"}], tokenizer)
    assert prompt.count(tokenizer.bos) == 1
    found = harness(chat=True).loglikelihood([request("loglikelihood", "the <|bos|>", "A")])
    assert_close(found, [by_hand(model, prompt, tokenizer.encode("A"))])


def test_a_long_context_loses_its_beginning_and_no_answer(
    harness: Callable[..., HarnessModel], model: Decoder, tokenizer: Tokenizer
) -> None:
    lm = harness()
    found = lm.loglikelihood([request("loglikelihood", WORDS, " A B C")])
    answer = [tokenizer.bos, *tokenizer.encode(WORDS.rstrip() + "\n A B C")]
    n = len(answer) - len([tokenizer.bos, *tokenizer.encode(WORDS.rstrip())])
    read = [tokenizer.bos, *answer[-(CONTEXT - 1) - 1 : -n]]
    assert len(read) + n - 1 == CONTEXT
    assert_close(found, [by_hand(model, read, answer[-n:])])
    assert lm.truncated == 1


def test_rolling_likelihood_counts_every_token_once(
    harness: Callable[..., HarnessModel], model: Decoder, tokenizer: Tokenizer
) -> None:
    short, long = "the cat sat", WORDS[:120]
    tokens = tokenizer.encode(long)
    assert len(tokens) > 2 * CONTEXT
    total = by_hand(model, [tokenizer.bos], tokens[:CONTEXT])[0]
    for begin in range(CONTEXT, len(tokens), CONTEXT):
        end = min(begin + CONTEXT, len(tokens))
        total += by_hand(model, tokens[end - CONTEXT - 1 : begin], tokens[begin:end])[0]
    expected = [by_hand(model, [tokenizer.bos], tokenizer.encode(short))[0], total]
    found = harness().loglikelihood_rolling([request("loglikelihood_rolling", text) for text in (short, long)])
    assert found == pytest.approx(expected, abs=1e-4)


def settings(**changes: Any) -> dict[str, Any]:
    return {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0, **changes}


def test_answers_depend_on_seed_document_and_repetition_only(
    harness: Callable[..., HarnessModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[list[int]] = []

    def recorded(*arguments: Any, **named: Any) -> list[list[int]]:
        found = generate(*arguments, **named)
        tokens.extend(list(new) for new in found)
        return found

    monkeypatch.setattr("lapbench.evaluation.answers.generate", recorded)
    one, other = request("generate_until", "the cat", settings()), request("generate_until", "a dog", settings())
    other.doc_id = 1
    first = harness(batch_size=8).generate_until([one] * 4 + [other])
    assert len({new[0] for new in tokens}) > 2
    assert len({tuple(new) for new in tokens}) == 5
    assert harness(batch_size=1).generate_until([other] + [one] * 4) == [first[4], *first[:4]]
    assert harness(seed=1).generate_until([one]) != first[:1]
    greedy = request("generate_until", "the cat", settings(do_sample=False))
    tokens.clear()
    harness().generate_until([greedy, greedy])
    assert tokens[0] == tokens[1]


def test_a_prompt_is_kept_and_the_answer_gets_the_rest_of_the_context(
    harness: Callable[..., HarnessModel], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Question] = []
    monkeypatch.setattr(Writer, "write", lambda self, questions: seen.extend(questions) or [""] * len(questions))
    lm = harness()
    lm.generate_until([request("generate_until", text, settings(max_gen_toks=100)) for text in ("the cat", WORDS)])
    long, short = seen
    assert list(short.prompt) == [tokenizer.bos, *tokenizer.encode("the cat")]
    kept = CONTEXT - CONTEXT // 4
    assert list(long.prompt) == [tokenizer.bos, *tokenizer.encode(WORDS)[-(kept - 1) :]]
    assert lm.truncated == 1


class Scripted:
    """Stands for ``generate``: hands out prepared tokens and remembers the prompts and how much it wrote."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.written = 0

    def __call__(self, model: Decoder, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
        self.prompts += prompts
        out: list[int] = []
        for token in self.turns.pop(0):
            out.append(token)
            self.written += 1
            if settings["done"](0, out):
                break
        return [out]


@pytest.mark.parametrize("until", ["dog sat", ["never", "dog sat", "log"]])
def test_stop_strings_end_an_answer(
    harness: Callable[..., HarnessModel], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    """Also one that begins and ends within tokens; what comes after it is not generated."""
    tokens = tokenizer.encode("😀 the dog saturday the log")
    script = Scripted(tokens)
    monkeypatch.setattr("lapbench.evaluation.answers.generate", script)
    asked = request("generate_until", "the cat", settings(do_sample=False, until=until, max_gen_toks=20))
    assert harness().generate_until([asked]) == ["😀 the "]
    assert script.written <= len(tokenizer.encode("😀 the dog sat")) < len(tokens)


def test_the_calculator_answers_calls_of_the_tool(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    special, encode = tokenizer.special, tokenizer.encode
    call = [special["<|python_start|>"], *encode("6*7"), special["<|python_end|>"]]
    script = Scripted([*encode("x"), *call, *encode("lost")], encode("y"))
    monkeypatch.setattr("lapbench.evaluation.answers.generate", script)
    question = Question((tokenizer.bos,), 0, (), 20, 0.0)
    assert Writer(model, tokenizer).write([question]) == ["xy"]
    output = [special["<|output_start|>"], *encode("42"), special["<|output_end|>"]]
    assert script.prompts == [[tokenizer.bos], [tokenizer.bos, *encode("x"), *call, *output]]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("1,200*2", "2400"),
        ("(3+4)*-2", "-14"),
        ("10/3", "3.33333"),
        ("0.1+0.2", "0.3"),
        ("7//2", "3"),
        ("1/0", None),
        ("9**9**9", None),
        ("__import__('os')", None),
        ("abs(3)", None),
        ("True+1", None),
        ("", None),
        ("2 +", None),
        ("(" * 5000, None),
        ("1e308*10", None),
    ],
)
def test_calculator(expression: str, result: str | None) -> None:
    assert calculate(expression) == result


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_two_processes_find_what_one_finds(
    model: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Batches are the same for any number of processes, so results are equal to the bit."""
    pairs = [(text, c) for text in ("the cat", "a dog on the log", "Answer:") for c in (" A", " the mat", " sat")]
    requests = [request("loglikelihood", *pair) for pair in pairs]
    answers = [request("generate_until", text, settings(), document=i) for i, (text, _) in enumerate(pairs)]

    def both(processes: Processes) -> Any:
        lm = HarnessModel(model, tokenizer, batch_size=2, processes=processes)
        return lm.loglikelihood(requests), lm.generate_until(answers)

    def process(rank: int, queue: Any) -> None:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        queue.put(both(Processes(rank, 2, None)))
        torch.distributed.destroy_process_group()

    # Forked: a new interpreter would import everything again.
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=process, args=(rank, queue)) for rank in range(2)]
    for child in children:
        child.start()
    found = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert found == [both(Processes())] * 2
