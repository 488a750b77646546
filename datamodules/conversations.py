"""Conversations: how they are written in JSONL files, and how they become tokens.

One object a line, ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}``:
user and assistant take turns, the user begins, and a system message may come before. An assistant's content may also
be a list of parts ``{"type": "text" | "python" | "python_output", "text": "..."}``: text, code for the tool, and what
the tool gave back. Rendered with nanochat's special tokens::

    <|bos|><|user_start|>...<|user_end|><|assistant_start|>...<|assistant_end|><|user_start|>...

A system message goes before the first user message, a blank line between them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

LETTERS = "ABCDEFGHIJ"

# The special tokens around a part, and whether the model has to write it: the tool writes its output.
_AROUND = {
    "text": (None, None, True),
    "python": ("<|python_start|>", "<|python_end|>", True),
    "python_output": ("<|output_start|>", "<|output_end|>", False),
}

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """A conversation as tokens: ``loss`` is 1 for each token that the assistant writes; ``text_bytes`` are UTF-8."""

    tokens: list[int]
    loss: list[int]
    text_bytes: int


class _Piece(NamedTuple):
    """A special token, or a text in which there is none."""

    content: str
    special: bool
    loss: int


def read_conversations(path: Path) -> Iterator[list[Message]]:
    """The checked messages of each line of a JSONL file; blank lines are passed over.

    Raises:
        UserError: the file cannot be read, or a line is no conversation; the message names file and line.
    """
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _messages(json.loads(line), f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"cannot read the conversations {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON: {' '.join(str(error).split())}") from error


def check_messages(messages: Any, where: str) -> list[Message]:
    """``messages`` if they are a conversation with at least one assistant turn.

    Raises:
        UserError: they are not; the message begins with ``where``.
    """
    _check_turns(messages, where)
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: expected at least one assistant turn, got none in {len(messages)} messages")
    return list(messages)


def render(conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer) -> list[Rendered]:
    """Checked conversations as tokens; all texts are encoded in one batch, and none of them makes a special token."""
    return _encoded([_pieces(messages) for messages in conversations], tokenizer)


def render_prompt(messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens after which the model writes its next turn: up to and with ``<|assistant_start|>``.

    Raises:
        UserError: the messages do not take turns, or the last one is not the user's.
    """
    _check_turns(messages, "prompt")
    if messages[-1]["role"] != "user":
        raise UserError(f"prompt: the last message must be the user's, got role {messages[-1]['role']!r}")
    pieces = [*_pieces(messages), _Piece("<|assistant_start|>", True, 0)]
    return _encoded([pieces], tokenizer)[0].tokens


def multiple_choice(question: str, choices: Sequence[str], letters: Sequence[str] = LETTERS) -> str:
    """The user message that asks a multiple-choice question; the answer is the letter alone.

    Every letter begins a line: byte-level BPE then makes it the token that the answer is, with nothing merged to it.

    Raises:
        UserError: more choices than letters, or fewer than two choices.
    """
    if not 2 <= len(choices) <= len(letters):
        raise UserError(f"a multiple-choice question takes 2 to {len(letters)} choices, got {len(choices)}")
    lines = [f"{letter}. {choice.strip()}" for letter, choice in zip(letters, choices, strict=False)]
    return "\n".join([question.strip(), "", *lines, "", "Answer with the letter of the correct choice only."])


def letter_tokens(tokenizer: Tokenizer, letters: Sequence[str] = LETTERS) -> list[int]:
    """The token of each letter.

    Raises:
        UserError: a letter that is not one token: its answer could not be scored by one prediction.
    """
    encoded = tokenizer.encode_batch(letters)
    for letter, ids in zip(letters, encoded, strict=True):
        if len(ids) != 1:
            raise UserError(f"{tokenizer.path}: the letter {letter!r} of a choice must be one token, got {len(ids)}")
    return [ids[0] for ids in encoded]


def _messages(content: Any, where: str) -> list[Message]:
    if not isinstance(content, dict) or "messages" not in content:
        raise UserError(f"{where}: expected an object with 'messages', got {_short(content)}")
    return check_messages(content["messages"], where)


def _check_turns(messages: Any, where: str) -> None:
    """UserError unless user and assistant take turns, each with some content."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError(f"{where}: 'messages' must be a list of at least one message, got {_short(messages)}")
    turns = 0
    for number, message in enumerate(messages, 1):
        place = f"{where}, message {number}"
        if not isinstance(message, Mapping):
            raise UserError(f"{place}: expected an object with 'role' and 'content', got {_short(message)}")
        role = message.get("role")
        if role == "system" and number == 1:
            expected = "system"
        else:
            expected = "assistant" if turns % 2 else "user"
            turns += 1
        if role != expected:
            raise UserError(f"{place}: expected role {expected!r} (the roles alternate), got {_short(role)}")
        _check_content(message.get("content"), role, place)
    if not turns:
        raise UserError(f"{where}: expected a user message after the system message, got none")


def _check_content(content: Any, role: str, place: str) -> None:
    if isinstance(content, list) and role == "assistant":
        if not content:
            raise UserError(f"{place}: 'content' must have at least one part, got an empty list")
        for number, part in enumerate(content, 1):
            _check_part(part, f"{place}, part {number}")
        if all(not _AROUND[part["type"]][2] for part in content):
            raise UserError(f"{place}: expected a part that the assistant writes, got only tool output")
        return
    if not isinstance(content, str):
        parts = " or a list of parts" if role == "assistant" else ""
        raise UserError(f"{place}: 'content' of the {role} must be a string{parts}, got {_short(content)}")
    _check_text(content, f"{place}: 'content'")


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, Mapping) or part.get("type") not in _AROUND or not isinstance(part.get("text"), str):
        types = ", ".join(_AROUND)
        raise UserError(f"{place}: expected {{'type': one of {types}, 'text': a string}}, got {_short(part)}")
    if part["type"] == "python_output":  # code may print nothing
        _check_characters(part["text"], f"{place}: 'text'")
    else:
        _check_text(part["text"], f"{place}: 'text'", blank=part["type"] == "text")


def _check_text(text: str, place: str, blank: bool = False) -> None:
    if not (text if blank else text.strip()):
        raise UserError(f"{place} must hold some text, got {text!r}")
    _check_characters(text, place)


def _check_characters(text: str, place: str) -> None:
    # JSON can spell half of a surrogate pair, which UTF-8 and the tokenizer cannot.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place} is no valid Unicode: character {error.start} is a lone surrogate") from error


def _pieces(messages: Sequence[Message]) -> list[_Piece]:
    """The conversation as special tokens and texts."""
    pieces = [_Piece("<|bos|>", True, 0)]
    system = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            system = f"{content}\n\n"
        elif role == "user":
            pieces += [
                _Piece("<|user_start|>", True, 0),
                _Piece(system + content, False, 0),
                _Piece("<|user_end|>", True, 0),
            ]
            system = ""
        else:
            pieces.append(_Piece("<|assistant_start|>", True, 0))
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                start, end, written = _AROUND[part["type"]]
                pieces += [_Piece(start, True, written)] if start else []
                pieces.append(_Piece(part["text"], False, written))
                pieces += [_Piece(end, True, written)] if end else []
            pieces.append(_Piece("<|assistant_end|>", True, 1))
    return pieces


def _encoded(conversations: Sequence[Sequence[_Piece]], tokenizer: Tokenizer) -> list[Rendered]:
    texts = [piece.content for pieces in conversations for piece in pieces if not piece.special]
    encoded = iter(tokenizer.encode_batch(texts))
    rendered = []
    for pieces in conversations:
        tokens: list[int] = []
        loss: list[int] = []
        for piece in pieces:
            ids = [tokenizer.special[piece.content]] if piece.special else next(encoded)
            tokens += ids
            loss += [int(piece.loss)] * len(ids)
        size = sum(len(piece.content.encode()) for piece in pieces if not piece.special)
        rendered.append(Rendered(tokens, loss, size))
    return rendered


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
