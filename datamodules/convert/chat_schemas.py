"""The Hugging Face schemas of data sets that become conversations: what a row means."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lapbench.datamodules.conversations import LETTERS, multiple_choice
from lapbench.datamodules.convert.formats import shorten
from lapbench.errors import UserError

_CALCULATION = re.compile(r"<<([^<>]*)>>")
_RESULT = re.compile(r"\n#### *\S+\s*\Z")

Content = str | list[dict[str, str]]
Messages = list[dict[str, Any]]


class Schema(NamedTuple):
    """A data set: title and description for the help, its columns, the split that is read unless told.

    ``messages`` makes a row's messages; its UserError says what is wrong with the row, but not where it is.
    ``wrapper`` may name a struct in which the columns are.
    """

    title: str
    description: str
    columns: tuple[str, ...]
    split: str
    messages: Callable[[Mapping[str, Any]], Messages]
    wrapper: str | None = None


def smoltalk(row: Mapping[str, Any]) -> Messages:
    """A row of SmolTalk without a blank system message; the messages are still to be checked."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError(f"'messages' must be a list of objects, got {shorten(messages)}")
    kept = [{"role": message.get("role"), "content": message.get("content")} for message in messages]
    if kept and kept[0]["role"] == "system" and not str(kept[0]["content"] or "").strip():
        del kept[0]
    return kept


def mmlu(row: Mapping[str, Any]) -> Messages:
    """A row of MMLU as a multiple-choice question and the letter of the answer."""
    choices, answer = row.get("choices"), row.get("answer")
    _need_strings(choices, "'choices'")
    assert isinstance(choices, list)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(f"'answer' must be the number of a choice, 0..{len(choices) - 1}, got {shorten(answer)}")
    return _question(row, choices, answer)


def arc(row: Mapping[str, Any]) -> Messages:
    """A row of ARC as a multiple-choice question and the letter of the answer."""
    choices, key = row.get("choices"), row.get("answerKey")
    if not isinstance(choices, dict):
        raise UserError(f"'choices' must be an object of 'text' and 'label', got {shorten(choices)}")
    texts, labels = choices.get("text"), choices.get("label")
    _need_strings(texts, "'text' of the choices")
    _need_strings(labels, "'label' of the choices")
    assert isinstance(texts, list)
    assert isinstance(labels, list)
    if len(texts) != len(labels):
        raise UserError(f"'choices' must have a label for each text, got {len(texts)} texts and {len(labels)} labels")
    if labels.count(key) != 1:
        raise UserError(f"'answerKey' must be one of the labels {', '.join(labels)}, got {shorten(key)}")
    return _question(row, texts, labels.index(key))


def gsm8k(row: Mapping[str, Any]) -> Messages:
    """A row of GSM8K, its calculations as calls of the Python tool, as in nanochat."""
    question, answer = _text(row, "question"), _answer(row)
    # re.split with a group: text, calculation, text, ...
    text, *rest = _CALCULATION.split(answer)
    parts = [{"type": "text", "text": text}] if text else []
    for calculation, text in zip(rest[::2], rest[1::2], strict=True):
        expression, equals, result = calculation.rpartition("=")
        if not equals or not expression.strip():
            raise UserError(f"'answer': expected a calculation like <<48/2=24>>, got <<{calculation}>>")
        parts += [{"type": "python", "text": expression}, {"type": "python_output", "text": result}]
        parts += [{"type": "text", "text": text}] if text else []
    return _turns(question, parts)


def gsm8k_plain(row: Mapping[str, Any]) -> Messages:
    """A row of GSM8K without its calculations."""
    return _turns(_text(row, "question"), _CALCULATION.sub("", _answer(row)))


_JSONL = "Local files in the Hugging Face schema to JSONL, one conversation a line."
_LETTERS = "Each row becomes a question with lettered choices, and the answer is the letter alone."

SCHEMAS = {
    "smoltalk": Schema(
        "SmolTalk",
        f"{_JSONL} Column: messages, a list of role and content; blank system messages are left out.",
        ("messages",),
        "train",
        smoltalk,
    ),
    "mmlu-auxiliary": Schema(
        "MMLU's auxiliary training questions",
        f"{_JSONL} Columns: question, choices, answer (the number of the right choice, from 0), also inside a struct "
        f"'train', where the auxiliary split has them. {_LETTERS}",
        ("question", "choices", "answer"),
        "auxiliary_train",
        mmlu,
        "train",
    ),
    "gsm8k": Schema(
        "GSM8K",
        f"{_JSONL} Columns: question, and answer with calculations like <<48/2=24>> and the result after ####.",
        ("question", "answer"),
        "train",
        gsm8k,
    ),
    "arc": Schema(
        "ARC, Easy or Challenge",
        f"{_JSONL} Columns: question, choices (text and label), answerKey. {_LETTERS} Choices are lettered A, B, C "
        "and so on whatever their labels are.",
        ("question", "choices", "answerKey"),
        "train",
        arc,
    ),
}


def _question(row: Mapping[str, Any], choices: list[str], answer: int) -> Messages:
    return _turns(multiple_choice(_text(row, "question"), choices), LETTERS[answer])


def _turns(user: str, assistant: Content) -> Messages:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _answer(row: Mapping[str, Any]) -> str:
    answer = _text(row, "answer")
    if not _RESULT.search(answer):
        raise UserError(f"'answer' must end in a line like '#### 72', got {shorten(answer[-40:])}")
    return answer


def _text(row: Mapping[str, Any], name: str) -> str:
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{name!r} must be a text, got {shorten(text)}")
    return text


def _need_strings(values: Any, what: str) -> None:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise UserError(f"{what} must be a list of strings, got {shorten(values)}")
