"""Tokens of text and bytes of tokens; special tokens never come out of text; files that are no such tokenizer."""

import hashlib
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapbench.datamodules.tokenizer import SPECIAL, Tokenizer
from lapbench.errors import UserError

TEXTS = [
    "",
    " ",
    "the cat",
    "naïve nai\u0308ve ﬁ",
    "漢字かな",
    "😀👨‍👩‍👧",
    "a\r\n\n\tb  ",
    "\x00\x7f",
    "<|bos|> <|endoftext|>",
]


def check(tokenizer, text):
    ids = tokenizer.encode(text)
    sizes = tokenizer.token_bytes()
    assert tokenizer.decode(ids) == text
    assert sum(sizes[i] for i in ids) == len(text.encode())
    assert not {*ids} & {*tokenizer.special.values()}


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_sum_to_those_of_the_text(tokenizer, text):
    check(tokenizer, text)


@settings(deadline=None, max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text(tokenizer, text):
    check(tokenizer, text)


def test_special_tokens_are_the_last_and_only_numbers(tokenizer):
    assert tokenizer.special == {name: 291 + i for i, name in enumerate(SPECIAL)}
    assert (tokenizer.vocab_size, tokenizer.bos) == (300, 291)
    sizes = tokenizer.token_bytes()
    assert sizes.shape == (300,)
    assert (sizes[:291] > 0).all()
    assert (sizes[291:] == 0).all()
    assert sorted(sizes[:256]) == [1] * 256
    assert tokenizer.decode([tokenizer.bos, *tokenizer.encode("a")]) == "<|bos|>a"


def test_a_batch_is_its_texts(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("again", [lambda t: Tokenizer.load(t.path), lambda t: pickle.loads(pickle.dumps(t))])
def test_names_of_special_tokens_stay_text_after_every_load(tokenizer, again):
    loaded = again(tokenizer)
    for name in (*SPECIAL, "<|endoftext|>"):
        check(loaded, f"x{name}y")
    assert loaded.encode("x<|bos|>y") == tokenizer.encode("x<|bos|>y")
    assert loaded.sha256 == tokenizer.sha256 == hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()


def test_truncation_and_padding_of_the_file_do_not_count(tokenizer, tmp_path):
    content = json.loads(tokenizer.path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "t.json").write_text(json.dumps(content))
    check(Tokenizer.load(tmp_path / "t.json"), "the cat sat")


def edited(change):
    """A tokenizer file with ``change`` made to its JSON."""

    def make(path: Path, tokenizer: Tokenizer) -> None:
        content = json.loads(tokenizer.path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return make


def without_two_special(content):
    del content["added_tokens"][3:5]


def plain_addition(content):
    content["added_tokens"][0]["special"] = False


def normalised(content):
    content["normalizer"] = {"type": "NFC"}


def prefixed(content):
    content["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def without_a_byte(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["zzz"] = vocabulary.pop("ÿ")


def gap(content):
    vocabulary = content["model"]["vocab"]
    vocabulary[next(token for token, number in vocabulary.items() if number == 280)] = 1000


def other_letters(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["▁the"] = vocabulary.pop(next(token for token, number in vocabulary.items() if number == 290))
    content["model"]["merges"].pop()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path, _: None, r"cannot read the tokenizer .*t\.json: No such file.*`lapbench data tokenizer`"),
        (lambda path, _: path.mkdir(), r"cannot read the tokenizer .*t\.json: Is a directory"),
        (lambda path, _: path.write_text(""), r"t\.json is no tokenizer\.json of the tokenizers library: EOF"),
        (lambda path, _: path.write_bytes(b"\xff\xfe"), r"t\.json is no tokenizer\.json of the tokenizers library"),
        (lambda path, _: path.write_text('{"version": "1.0"}'), r"is no tokenizer\.json .*Model missing"),
        (edited(without_two_special), r"lacks the special tokens <\|assistant_start\|>, <\|assistant_end\|>"),
        (edited(plain_addition), r"the added token '<\|bos\|>' is not special"),
        (edited(normalised), r"does not keep every byte of a text: text comes back changed"),
        (edited(prefixed), r"does not keep every byte of a text: text comes back changed"),
        (edited(without_a_byte), r"does not keep every byte of a text: it has no token for 'ÿ'"),
        (edited(gap), r"t\.json has 300 tokens, but none of number 280"),
        (edited(other_letters), r"t\.json is not byte-level: token 290 is '▁the'"),
    ],
)
def test_not_a_tokenizer(tokenizer, tmp_path, make, message):
    make(tmp_path / "t.json", tokenizer)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(tmp_path / "t.json")
    assert "\n" not in str(error.value)
