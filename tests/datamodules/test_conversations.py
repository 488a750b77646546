"""Conversations: what is refused and where, what becomes of turns and tools, what is to be predicted."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapbench.datamodules.conversations import (
    LETTERS,
    check_messages,
    letter_tokens,
    multiple_choice,
    read_conversations,
    render,
    render_prompt,
)
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.tokenizer import SPECIAL, Tokenizer
from lapbench.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = "What is the answer to the question? The answer is the letter of the choice. "
    return train_tokenizer([text * 3], 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


TOOLS = [
    {"type": "text", "text": "It is "},
    {"type": "python", "text": "1+1"},
    {"type": "python_output", "text": "2"},
    {"type": "text", "text": " 2."},
]


def test_turns_and_what_the_model_writes(tokenizer):
    messages = [
        {"role": "system", "content": "Be short."},
        user("1+1?"),
        assistant(TOOLS),
        user("Sure?"),
        assistant("é"),
    ]
    [rendered] = render([messages], tokenizer)
    assert tokenizer.decode(rendered.tokens) == (
        "<|bos|><|user_start|>Be short.\n\n1+1?<|user_end|>"
        "<|assistant_start|>It is <|python_start|>1+1<|python_end|><|output_start|>2<|output_end|> 2.<|assistant_end|>"
        "<|user_start|>Sure?<|user_end|><|assistant_start|>é<|assistant_end|>"
    )
    written = [token for token, loss in zip(rendered.tokens, rendered.loss, strict=True) if loss]
    assert tokenizer.decode(written) == "It is <|python_start|>1+1<|python_end|> 2.<|assistant_end|>é<|assistant_end|>"
    assert rendered.text_bytes == tokenizer.token_bytes()[rendered.tokens].sum()


def test_a_prompt_is_what_comes_before_the_answer(tokenizer):
    messages = [user("one"), assistant("two"), user("three"), assistant("four")]
    [whole] = render([messages], tokenizer)
    prompt = render_prompt(messages[:3], tokenizer)
    assert prompt == whole.tokens[: len(prompt)]
    assert tokenizer.decode(whole.tokens[len(prompt) :]) == "four<|assistant_end|>"
    with pytest.raises(UserError, match="prompt: the last message must be the user's, got role 'assistant'"):
        render_prompt(messages, tokenizer)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(SPECIAL), min_size=2, max_size=5))
def test_no_text_makes_a_special_token(tokenizer, texts):
    texts = [text if text.strip() else SPECIAL[0] for text in texts]
    messages = [[user, assistant][i % 2](text) for i, text in enumerate(texts)]
    [rendered] = render([check_messages(messages, "x")], tokenizer)
    special = set(tokenizer.special.values())
    assert sum(token in special for token in rendered.tokens) == 1 + 2 * len(texts)
    assert rendered.tokens.count(tokenizer.bos) == 1
    assert rendered.text_bytes == sum(len(text.encode()) for text in texts)
    assert sum(rendered.loss) == sum(len(tokenizer.encode(text)) + 1 for text in texts[1::2])


def test_a_batch_is_rendered_as_its_conversations_one_by_one(tokenizer):
    conversations = [
        [user("a b"), assistant("c")],
        [user("?"), assistant(TOOLS)],
        [user("x"), assistant("y"), user("z")],
    ]
    assert render(conversations, tokenizer) == [render([one], tokenizer)[0] for one in conversations]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({}, "'messages' must be a list of at least one message, got {}"),
        ([], "'messages' must be a list of at least one message, got []"),
        (["hi"], "message 1: expected an object with 'role' and 'content', got 'hi'"),
        ([assistant("a")], "message 1: expected role 'user' (the roles alternate), got 'assistant'"),
        ([user("a"), user("b")], "message 2: expected role 'assistant' (the roles alternate), got 'user'"),
        ([user("a"), {"role": "tool", "content": "b"}], "message 2: expected role 'assistant'"),
        ([user("a"), {"role": "system", "content": "b"}], "message 2: expected role 'assistant'"),
        ([{"content": "a"}], "message 1: expected role 'user' (the roles alternate), got None"),
        ([{"role": "system", "content": "a"}], "expected a user message after the system message, got none"),
        ([user("a")], "expected at least one assistant turn, got none in 1 messages"),
        ([user(" \n")], "message 1: 'content' must hold some text, got ' \\n'"),
        ([user(3)], "message 1: 'content' of the user must be a string, got 3"),
        ([user(TOOLS)], "message 1: 'content' of the user must be a string, got [{"),
        (
            [user("a"), {"role": "assistant"}],
            "'content' of the assistant must be a string or a list of parts, got None",
        ),
        ([user("a"), assistant([])], "message 2: 'content' must have at least one part"),
        ([user("a"), assistant([{"type": "image", "text": "b"}])], "message 2, part 1: expected {'type': one of text"),
        ([user("a"), assistant([{"type": "text"}])], "message 2, part 1: expected {'type'"),
        ([user("a"), assistant([{"type": "python", "text": " "}])], "part 1: 'text' must hold some text"),
        ([user("a"), assistant(TOOLS[2:3])], "message 2: expected a part that the assistant writes"),
        (
            [user("a"), assistant("b\ud800")],
            "message 2: 'content' is no valid Unicode: character 1 is a lone surrogate",
        ),
    ],
)
def test_what_is_no_conversation(messages, message, tmp_path):
    with pytest.raises(UserError) as error:
        check_messages(messages, "here")
    assert message in str(error.value)
    assert str(error.value).startswith("here")
    file = tmp_path / "bad.jsonl"
    good = json.dumps({"messages": [user("a"), assistant("b")]})
    file.write_text(f"{good}\n\n{json.dumps({'messages': messages})}\n{good}\n")
    lines = read_conversations(file)
    assert next(lines) == [user("a"), assistant("b")]
    with pytest.raises(UserError) as error:
        next(lines)
    assert str(error.value).startswith(f"{file}, line 3")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "line 1: not JSON: Expecting value"),
        (b"[1, 2]", "line 1: expected an object with 'messages', got [1, 2]"),
        (b'{"text": "hi"}', "line 1: expected an object with 'messages', got {'text': 'hi'}"),
        (b'{"messages": "\xff"}', "line 1: not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 100_000, "line 1: not JSON: "),
    ],
)
def test_lines_that_are_no_json_object(line, message, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(line + b"\n")
    with pytest.raises(UserError) as error:
        list(read_conversations(file))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file():
    with pytest.raises(UserError, match=r"cannot read the conversations no\.jsonl: No such file"):
        list(read_conversations(Path("no.jsonl")))


def test_multiple_choice(tokenizer):
    prompt = multiple_choice("Which? ", ["red", " blue"])
    assert prompt == "Which?\n\nA. red\nB. blue\n\nAnswer with the letter of the correct choice only."
    letters = letter_tokens(tokenizer)
    assert len(set(letters)) == len(LETTERS)
    # The model sees each letter as the token that it has to answer with, and the answer is one token.
    ids = tokenizer.encode(prompt)
    assert letters[0] in ids
    assert letters[1] in ids
    [rendered] = render([[user(prompt), assistant("B")]], tokenizer)
    assert [token for token, loss in zip(rendered.tokens, rendered.loss, strict=True) if loss] == [
        letters[1],
        tokenizer.special["<|assistant_end|>"],
    ]


def test_multiple_choice_that_cannot_be_asked(tokenizer):
    for choices in (["one"], ["x"] * 11):
        with pytest.raises(UserError, match=f"takes 2 to 10 choices, got {len(choices)}"):
            multiple_choice("Which?", choices)
    with pytest.raises(UserError, match="the letter 'AQ' of a choice must be one token, got 2"):
        letter_tokens(tokenizer, ["A", "AQ"])
