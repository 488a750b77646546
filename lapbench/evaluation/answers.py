"""Answers that a decoder writes: until a stop string, a stop token or the end of its context, with its calculator."""

from collections.abc import Sequence
from dataclasses import dataclass

from lapbench.backbones import Decoder
from lapbench.backbones.generation import generate
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.evaluation.calculator import calculate


@dataclass(frozen=True)
class Question:
    """What a model is to continue.

    Attributes:
        prompt: Tokens.
        seed: Decides what is drawn.
        until: Strings that end the answer, not part of it.
        max_new_tokens: Most tokens of the answer.
        temperature: 0 takes the likeliest tokens.
    """

    prompt: tuple[int, ...]
    seed: int
    until: tuple[str, ...]
    max_new_tokens: int
    temperature: float


class Writer:
    """Writes answers, many at a time; each depends on its question alone, not on the others.

    Where the model calls its Python tool, ``<|python_start|>2*3<|python_end|>``, the calculator's result is put after
    it as ``<|output_start|>6<|output_end|>`` and the model goes on. Neither is part of the answer's text.

    Args:
        model: The decoder.
        tokenizer: Its tokenizer.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        special = tokenizer.special
        self._call, self._called = special["<|python_start|>"], special["<|python_end|>"]
        self._output, self._end_of_output = special["<|output_start|>"], special["<|output_end|>"]
        tools = (self._call, self._called, self._output, self._end_of_output)
        self._stop_tokens = [token for token in special.values() if token not in tools]

    def write(self, questions: Sequence[Question]) -> list[str]:
        """The answer to each question, all of one temperature."""
        written: list[list[int]] = [[] for _ in questions]
        limits = [min(q.max_new_tokens, self.model.context - len(q.prompt)) for q in questions]
        open_ones = list(range(len(questions)))
        turn = 0
        while open_ones:
            self._write_on([questions[i] for i in open_ones], [written[i] for i in open_ones], limits, open_ones, turn)
            open_ones = [i for i in open_ones if self._calculated(written[i]) and len(written[i]) < limits[i]]
            turn += 1
        return [self._text(tokens, q.until) for tokens, q in zip(written, questions, strict=True)]

    def _write_on(
        self,
        questions: Sequence[Question],
        written: Sequence[list[int]],
        limits: Sequence[int],
        numbers: Sequence[int],
        turn: int,
    ) -> None:
        """Adds to ``written`` what the model writes until it is done or calls the tool."""
        left = [limits[number] - len(tokens) for number, tokens in zip(numbers, written, strict=True)]

        def done(row: int, new: Sequence[int]) -> bool:
            return len(new) >= left[row] or new[-1] == self._called or self._stops(new, questions[row].until)

        answers = generate(
            self.model,
            [[*q.prompt, *tokens] for q, tokens in zip(questions, written, strict=True)],
            max_new_tokens=max(left),
            temperature=questions[0].temperature,
            stop_tokens=self._stop_tokens,
            seeds=[mixed(q.seed, turn) % 2**62 for q in questions],
            done=done,
        )
        for tokens, new in zip(written, answers, strict=True):
            tokens += new

    def _stops(self, tokens: Sequence[int], until: Sequence[str]) -> bool:
        if not until:
            return False
        # A token is a byte at least; up to three bytes before may belong to its first character.
        longest = max(len(stop.encode()) for stop in until) + 3
        text = self.tokenizer.decode(tokens[-longest:])
        return any(stop in text for stop in until)

    def _calculated(self, tokens: list[int]) -> bool:
        """Whether ``tokens`` end in a call of the tool; its output is added if it has one."""
        if not tokens or tokens[-1] != self._called:
            return False
        if self._call in tokens:
            begin = len(tokens) - 1 - tokens[::-1].index(self._call)
            result = calculate(self.tokenizer.decode(tokens[begin + 1 : -1]))
            if result is not None:
                tokens += [self._output, *self.tokenizer.encode(result), self._end_of_output]
        return True

    def _text(self, tokens: Sequence[int], until: Sequence[str]) -> str:
        """The answer's text, without calls of the tool, up to the first stop string."""
        kept = []
        closing = None
        for token in tokens:
            if closing is None and token in (self._call, self._output):
                closing = self._called if token == self._call else self._end_of_output
            elif token == closing:
                closing = None
            elif closing is None and token not in (self._called, self._end_of_output):
                kept.append(token)
        text = self.tokenizer.decode(kept)
        ends = [text.index(stop) for stop in until if stop in text]
        return text[: min(ends)] if ends else text
