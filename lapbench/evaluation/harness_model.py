"""A decoder as a model of lm-evaluation-harness. Imports ``lm_eval``, so import this module only where it is needed."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from lapbench.backbones import Decoder
from lapbench.datamodules.conversations import render_prompt
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.evaluation.answers import Question, Writer
from lapbench.evaluation.processes import Processes

DEFAULT_NEW_TOKENS = 256
_POSITIONS_AT_ONCE = 4096  # whose logits are in memory together

Progress = Callable[[int, int], None]
Likelihood = tuple[float, bool]


class Scored(NamedTuple):
    """Inputs of one forward pass, and the continuations whose likelihoods are read off its last positions."""

    inputs: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """Log-likelihoods and generated answers of a decoder.

    Every context begins with ``<|bos|>``. A sequence that is longer than the model's context loses tokens after that,
    from the left, never of the continuation that is scored or of the answer. Batches are made of all requests, sorted
    by length, and shared among the processes whole, so that the number of processes changes no result.

    Args:
        model: The decoder, in evaluation mode.
        tokenizer: Its tokenizer.
        batch_size: Sequences in a batch of one process.
        chat: Whether a context is what a user says to a model fine-tuned on conversations: it is rendered as a turn,
            and the continuation begins the assistant's.
        separate: Whether context and continuation become tokens each on its own, also where together they would
            become others. A chat's always do.
        seed: Decides, with the task, document and repetition, what a sampled answer is.
        processes: Those that share the work.
        autocast: Makes the context in which the model computes.
        progress: Gets the batches done and all batches, on each process.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 16,
        chat: bool = False,
        separate: bool = False,
        seed: int = 0,
        processes: Processes | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        progress: Progress = lambda done, total: None,
    ) -> None:
        super().__init__()
        self.decoder = model
        self.tokens = tokenizer
        self.batch_size = batch_size
        self.chat = chat
        self.separate = separate
        self.seed = seed
        self.processes = processes or Processes()
        self.autocast = autocast
        self.progress = progress
        self.truncated = 0
        """Requests that lost tokens of their context so far."""

    @property
    def eot_token_id(self) -> int:
        """``<|bos|>``, which is also what ends a document."""
        return self.tokens.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, ``<|bos|>`` before them unless ``add_special_tokens`` is False."""
        ids = self.tokens.encode(string)
        return ids if add_special_tokens is False else [self.tokens.bos, *ids]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Likelihood]:
        """The log-likelihood of each (context, continuation), in nats, and whether greedy decoding would write it."""
        result: list[Likelihood] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return result

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-likelihood of each whole text, in windows of the context's length; every token counts once."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tokens.encode(request.args[0]),
                prefix_token=self.tokens.bos,
                max_seq_len=self.decoder.context,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                pairs.append((("", ""), *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (likelihood, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[number] += likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The answer to each (context, settings), cut off before the first string of ``until``."""
        repeats: Counter[int] = Counter()
        questions: dict[float, list[tuple[int, Question]]] = defaultdict(list)
        for number, request in enumerate(requests):
            question = self._question(request, repeats[id(request)])
            repeats[id(request)] += 1  # a repeated request is the same object
            questions[question.temperature].append((number, question))
        batches = []
        for group in questions.values():
            group.sort(key=lambda pair: (-len(pair[1].prompt), pair[1].prompt))
            batches += [group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]
        writer = Writer(self.decoder, self.tokens)

        def answers(batch: list[tuple[int, Question]]) -> list[str]:
            with self.autocast():
                return writer.write([question for _, question in batch])

        out = [""] * len(requests)
        for batch, texts in zip(batches, self._map(answers, batches), strict=True):
            for (number, _), text in zip(batch, texts, strict=True):
                out[number] = text
        return out

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self.chat:
            return self._prompt(context), self.tokens.encode(continuation)
        if self.separate:
            return self.tok_encode(context), self.tokens.encode(continuation)
        pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return pair

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[Likelihood]:
        pairs = [self._inputs(context, continuation) for _, context, continuation in requests]
        # Continuations of one token each share the forward pass of their context.
        targets_of: dict[tuple[int, ...], dict[tuple[int, ...], None]] = defaultdict(dict)
        for inputs, targets in pairs:
            targets_of[inputs][targets] = None
        scored = [Scored(inputs, tuple(targets)) for inputs, targets in targets_of.items()]
        scored.sort(key=lambda s: (-len(s.inputs), s.inputs))
        batches = [scored[i : i + self.batch_size] for i in range(0, len(scored), self.batch_size)]
        found = {}
        for batch, likelihoods in zip(batches, self._map(self._likelihoods, batches), strict=True):
            for one, values in zip(batch, likelihoods, strict=True):
                found.update({(one.inputs, t): value for t, value in zip(one.targets, values, strict=True)})
        return [found[pair] for pair in pairs]

    def _map(self, function: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """``function`` of each batch, shared among the processes."""
        count = len(range(self.processes.rank, len(batches), self.processes.count))
        done = 0

        def counted(batch: Any) -> Any:
            nonlocal done
            result = function(batch)
            done += 1
            self.progress(done, count)
            return result

        return self.processes.map(counted, batches)

    def _inputs(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the model reads, and what its last outputs are compared with."""
        tokens = (*context, *continuation)[:-1]
        most = self.decoder.context
        if len(tokens) > most:
            self.truncated += 1
            tokens = (tokens[0], *tokens[len(tokens) - most + 1 :])
        return tokens, tuple(continuation)[-len(tokens) :]

    @torch.inference_mode()
    def _likelihoods(self, batch: Sequence[Scored]) -> list[list[Likelihood]]:
        longest = max(len(one.inputs) for one in batch)
        # Padding comes after what is read: no position sees a later one.
        rows = [[*one.inputs, *[0] * (longest - len(one.inputs))] for one in batch]
        with self.autocast():
            features = self.decoder.forward_features(torch.tensor(rows, device=self.decoder.embedding.weight.device))
        lengths = [max(map(len, one.targets)) for one in batch]
        spans = [slice(len(one.inputs) - n, len(one.inputs)) for one, n in zip(batch, lengths, strict=True)]
        ends = [row[span] for row, span in zip(features, spans, strict=True)]
        out: list[list[Likelihood]] = []
        for one, log_probs in zip(batch, self._log_probs(ends), strict=True):
            out.append([_likelihood(log_probs, targets) for targets in one.targets])
        return out

    def _log_probs(self, ends: Sequence[Tensor]) -> list[Tensor]:
        """Of features [n_i, D] the log-probabilities [n_i, V], in float32."""
        pieces = []
        for piece in torch.split(torch.cat(list(ends)), _POSITIONS_AT_ONCE):
            with self.autocast():
                logits = self.decoder.forward_head(piece)
            pieces.append(torch.log_softmax(logits.float(), dim=-1))
        return list(torch.split(torch.cat(pieces), [len(end) for end in ends]))

    def _prompt(self, context: str) -> list[int]:
        if self.chat:
            return render_prompt([{"role": "user", "content": context}], self.tokens)
        return self.tok_encode(context)

    def _question(self, request: Instance, repeat: int) -> Question:
        context, settings = request.args
        most = int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        prompt = self._prompt(context)
        # The prompt is kept and the answer gets what is left, but a quarter of the context at least.
        room = self.decoder.context - min(most, max(1, self.decoder.context // 4))
        if len(prompt) > room:
            self.truncated += 1
            prompt = [prompt[0], *prompt[len(prompt) - room + 1 :]]
        until = settings.get("until") or ()
        return Question(
            prompt=tuple(prompt),
            seed=mixed(self.seed, request.task_name or "", request.doc_id or 0, repeat),
            until=(until,) if isinstance(until, str) else tuple(until),
            max_new_tokens=most,
            temperature=float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0,
        )


def _likelihood(log_probs: Tensor, targets: Sequence[int]) -> Likelihood:
    """Of the last ``len(targets)`` positions of ``log_probs`` [n, V]."""
    if not targets:
        return 0.0, True
    own = log_probs[len(log_probs) - len(targets) :]
    wanted = torch.tensor(targets, device=own.device)
    chosen = own.gather(1, wanted[:, None])
    return float(chosen.double().sum()), bool((own.argmax(dim=1) == wanted).all())
