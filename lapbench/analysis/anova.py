"""Analysis of variance of tokens: how much of it lies within sequences, within classes and between classes."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

IGNORED = -100
# Tokens in float64, and classes of all processes together, that are held at once beside the state; on CPUs, tokens that
# stay in a cache are twice as fast.
AT_ONCE = 4096
CPU_AT_ONCE = 512


class TokenANOVA(Metric):
    """Fractions of the tokens' variance (arXiv 2602.09297, sections 4.1 and 4.2).

    With tokens x of sequence i in class c, means mu_i, mu_c, mu_G over tokens and N tokens in all,
    1/N sum |x - mu_G|^2 = 1/N sum |x - mu_i|^2 + 1/N sum |mu_i - mu_c|^2 + 1/N sum |mu_c - mu_G|^2: total, within
    sequences, within classes, between classes. In language models a token's class is its target, so there are two
    levels: within classes sums |x - mu_c|^2.

    Squares are always about means of what they belong to, joined as Chan et al. do (1979, "Updating Formulae and a
    Pairwise Algorithm for Computing Sample Variances"): a large common offset costs no digits. The state takes
    8 C D bytes from the first update on, and no step makes a second copy of it but ``forward``: use ``update``.
    Processes exchange a few classes at a time, and keep one number of each level.

    Args:
        num_classes: C; labels are 0..C-1.
        embed_dim: D.
    """

    is_differentiable = False
    full_state_update = False
    levels: Tensor
    reference: Tensor
    class_tokens: Tensor
    class_sums: Tensor
    sequence_squares: Tensor
    class_squares: Tensor
    between_squares: Tensor

    def __init__(self, num_classes: int, embed_dim: int) -> None:
        super().__init__()
        self.num_classes, self.embed_dim = num_classes, embed_dim
        zero = torch.zeros((), dtype=torch.float64)
        add: Callable[[str, Tensor], None] = self.add_state  # the merges are below: no state has a reduction of its own
        add("levels", torch.zeros((), dtype=torch.int64))  # 2 or 3; 0: nothing seen
        # The first token that was seen: sums are of differences from it, which are exact zeros for constant tokens.
        add("reference", torch.zeros(embed_dim, dtype=torch.float64))
        add("class_tokens", torch.zeros(num_classes, dtype=torch.float64))
        # [C, D] once it is needed: torchmetrics keeps a copy of every state's default.
        add("class_sums", torch.zeros(0, embed_dim, dtype=torch.float64))
        add("sequence_squares", zero)
        add("class_squares", zero)
        add("between_squares", zero)  # while synchronized; otherwise ``class_sums`` has it

    def update(self, tokens: Tensor, labels: Tensor) -> None:
        """Adds sequences.

        Args:
            tokens: [B, T, D] in any floating-point type, of any length T of at least 1.
            labels: Of sequences, [B]: three levels; or of tokens, [B, T]: two. What is labelled -100 is left out.

        Raises:
            ValueError: Shapes or labels that do not fit, or both kinds of labels in one metric.
        """
        self._check(tokens, labels)
        self.levels, tokens = torch.full_like(self.levels, 4 - labels.ndim), tokens.detach()
        if labels.ndim == 2:
            tokens, labels = tokens.flatten(0, 1), labels.flatten()
        kept = labels != IGNORED
        if not kept.all():
            tokens, labels = tokens[kept], labels[kept]
        if not len(labels):
            return
        if not len(self.class_sums):
            with torch.inference_mode(False):  # else it could not be updated outside of it
                shape = (self.num_classes, self.embed_dim)
                self.class_sums = torch.zeros(shape, dtype=torch.float64, device=tokens.device)
            self.reference = tokens.reshape(-1, self.embed_dim)[0].double()
        at_once = min(AT_ONCE, CPU_AT_ONCE) if tokens.device.type == "cpu" else AT_ONCE
        at_once = max(1, at_once * self.embed_dim // tokens[0].numel())
        for piece, of_piece in zip(torch.split(tokens, at_once), torch.split(labels, at_once), strict=True):
            if tokens.ndim == 3:
                self._add(self._sequence_means(piece), of_piece, piece.size(1))
            else:
                self._add(piece - self.reference, of_piece, 1)

    def compute(self) -> dict[str, float | None]:
        """Fractions of the total, which sum to 1, and ``total``: variance of a token, summed over features.

        Returns:
            ``within_sequence`` (with labels of sequences only), ``within_class``, ``between_class`` and ``total``. The
            fractions are None where there is nothing to divide, a total of 0; all are None if a token is not finite.

        Raises:
            ValueError: No tokens seen.
        """
        count = float(self.class_tokens.sum())
        if not count:
            raise ValueError(f"{type(self).__name__}: no tokens seen")
        within, between = self.class_squares, self.between_squares
        if not self._is_synced:
            _, within, between = self._joined(_alone)
        squares = {"within_class": float(within), "between_class": float(between)}
        if self.levels == 3:
            squares = {"within_sequence": float(self.sequence_squares), **squares}
        total = sum(squares.values())
        if not total < float("inf"):
            return dict.fromkeys((*squares, "total"))
        fractions = {name: value / total if total else None for name, value in squares.items()}
        return {**fractions, "total": total / count}

    def _check(self, tokens: Tensor, labels: Tensor) -> None:
        me, shape = type(self).__name__, tuple(tokens.shape)
        if tokens.ndim != 3 or not tokens.size(1) or tokens.size(2) != self.embed_dim:
            raise ValueError(f"{me}: expected tokens [B, T, {self.embed_dim}] with T at least 1, got {shape}")
        if tuple(labels.shape) not in (shape[:1], shape[:2]):
            raise ValueError(f"{me}: expected labels {shape[:1]} or {shape[:2]}, got {tuple(labels.shape)}")
        if int(self.levels) not in (0, 4 - labels.ndim):
            raise ValueError(f"{me}: expected labels of one kind, [B] or [B, T], got both")
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= self.num_classes))]
        if len(wrong):
            raise ValueError(f"{me}: expected labels 0..{self.num_classes - 1} or {IGNORED}, got {int(wrong[0])}")

    def _sequence_means(self, tokens: Tensor) -> Tensor:
        """Means relative to the reference, [B, D]; the squares about them are added."""
        first = tokens[:, :1].double()
        centred = tokens - first
        means = centred.mean(dim=1, keepdim=True)
        centred -= means
        self.sequence_squares = self.sequence_squares + centred.flatten().dot(centred.flatten())
        return (first - self.reference + means).squeeze(1)

    def _add(self, rows: Tensor, labels: Tensor, weight: int) -> None:
        """Adds rows relative to the reference, [n, D], that stand for ``weight`` tokens each."""
        classes, group, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        sums = rows.new_zeros(len(classes), self.embed_dim).index_add_(0, group, rows)
        centred = rows - (sums / counts[:, None])[group]
        self.class_squares = self.class_squares + weight * centred.flatten().dot(centred.flatten())
        self._join(classes, counts.double() * weight, sums * weight)

    def _join(self, classes: Tensor, count: Tensor, sums: Tensor) -> None:
        """Adds what is known of different classes [n]: tokens [n] and their sums relative to the reference [n, D]."""
        before = self.class_tokens[classes]
        apart = sums / count[:, None] - self.class_sums[classes] / before.clamp(min=1)[:, None]
        self.class_squares = self.class_squares + before * count / (before + count) @ apart.square().sum(dim=1)
        self.class_tokens = self.class_tokens.index_add(0, classes, count)
        self.class_sums.index_add_(0, classes, sums)

    def _joined(self, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of each class, and squares within and between classes, of all processes.

        Args:
            gather: Stacks the tensor of each process.
        """
        counts, references = gather(self.class_tokens), gather(self.reference)
        seen = counts.sum(dim=1)
        # All relative to the reference of the first process that has one.
        shifts = references - references[int((seen > 0).int().argmax())]
        mean = (gather(self.class_sums.sum(dim=0)) + seen[:, None] * shifts).sum(dim=0) / seen.sum()
        within, between = gather(self.class_squares).sum(), torch.zeros_like(self.between_squares)
        for chosen in _pieces(self.num_classes, max(1, AT_ONCE // len(counts))):
            count = counts[:, chosen, None]
            own = self.class_sums[chosen] if len(self.class_sums) else count.new_zeros(count.size(1), self.embed_dim)
            sums = gather(own) + count * shifts[:, None]
            all_of_class = count.sum(dim=0)
            means = sums.sum(dim=0) / all_of_class.clamp(min=1)
            if len(counts) > 1:
                within = within + (count * (sums / count.clamp(min=1) - means).square()).sum()
            between = between + (all_of_class * (means - mean).square()).sum()
        return counts.sum(dim=0), within, between

    def _sync_dist(self, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        def gather(of_process: Tensor) -> Tensor:
            return torch.stack(dist_sync_fn(of_process, group=process_group or self.process_group))

        levels = gather(self.levels)
        if {2, 3} <= set(levels.tolist()):
            raise ValueError(f"{type(self).__name__}: expected labels of one kind on all processes, got [B] and [B, T]")
        counts, within, between = self._joined(gather)
        self.levels, self.sequence_squares = levels.max(), gather(self.sequence_squares).sum()
        self.class_tokens, self.class_squares, self.between_squares = counts, within, between
        self.class_sums = self.class_sums[:0]

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        """Adds another's state, for ``merge_state`` and ``forward``."""
        theirs = incoming_state
        if {2, 3} == {int(self.levels), int(theirs["levels"])}:
            raise ValueError(f"{type(self).__name__}: expected labels of one kind, [B] or [B, T], got both")
        self.levels = torch.maximum(self.levels, theirs["levels"])
        self.sequence_squares = self.sequence_squares + theirs["sequence_squares"]
        self.class_squares = self.class_squares + theirs["class_squares"]
        if not len(theirs["class_sums"]):
            return
        if not len(self.class_sums):
            self.reference = theirs["reference"].clone()
            self.class_tokens, self.class_sums = theirs["class_tokens"].clone(), theirs["class_sums"].clone()
            return
        shift = theirs["reference"] - self.reference
        for classes in torch.split(theirs["class_tokens"].nonzero().squeeze(1), AT_ONCE):
            count = theirs["class_tokens"][classes]
            self._join(classes, count, theirs["class_sums"][classes] + count[:, None] * shift)

    def _copy_state_dict(self) -> dict[str, Any]:
        """What ``sync`` and ``forward`` put back: the tensors themselves, as both replace and change none of them."""
        return dict(self.metric_state)


def _alone(of_process: Tensor) -> Tensor:
    return of_process[None]


def _pieces(count: int, at_once: int) -> Iterator[slice]:
    for start in range(0, count, at_once):
        yield slice(start, start + at_once)
