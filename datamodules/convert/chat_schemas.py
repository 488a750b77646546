"""Data sets of questions and conversations to conversation JSONL (see `conversations`), from local parquet or JSONL
files in the Hugging Face schemas:

- SmolTalk: ``messages``, a list of ``role`` and ``content``; a blank system message is left out;
- MMLU: ``question``, ``choices``, ``answer`` (the number of the right choice), also inside a struct ``train``, where
  the auxiliary split has them;
- ARC: ``question``, ``choices`` (``text`` and ``label``), ``answerKey``; the choices become A, B, C, ... whatever their
  labels;
- GSM8K: ``question`` and ``answer``, with calculations ``<<48/2=24>>`` and the result after ``####``. As in nanochat a
  calculation becomes a call of the Python tool and its output; ``--calculations remove`` leaves plain text.
"""

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
    """A data set: its title, its columns, the split that is read unless told, and a row's messages.

    ``messages`` raises UserError that says what is wrong with the row, but not where it is. ``wrapper`` may name a
    struct in which the columns are.
    """

    title: str
    columns: tuple[str, ...]
    split: str
    messages: Callable[[Mapping[str, Any]], Messages]
    wrapper: str | None = None


def smoltalk(row: Mapping[str, Any]) -> Messages:
    """A row of SmolTalk as messages; what they must be is checked by whoever writes them."""
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
    """A row of GSM8K, its calculations as calls of the Python tool."""
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


SCHEMAS = {
    "smoltalk": Schema("SmolTalk", ("messages",), "train", smoltalk),
    "mmlu-auxiliary": Schema(
        "MMLU's auxiliary training questions", ("question", "choices", "answer"), "auxiliary_train", mmlu, "train"
    ),
    "gsm8k": Schema("GSM8K", ("question", "answer"), "train", gsm8k),
    "arc": Schema("ARC (Easy or Challenge)", ("question", "choices", "answerKey"), "train", arc),
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
