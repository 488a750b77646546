"""The few samples that figures of token geometry show: the same for any batches and any number of processes."""

import base64
import io
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapbench.datamodules.plan import mixed
from lapbench.evaluation.processes import Processes

# A scatter shows the first IMAGES images of each of the first CLASSES classes, at most TOKENS tokens of an image.
CLASSES, IMAGES, TOKENS = 10, 10, 16
MAPS = 4


@dataclass
class FirstSamples:
    """Keeps the first samples of each class by their place in the split.

    Attributes:
        classes: Which classes; others are left out.
        count: Samples of each class.
        kept: By class, place and content of those seen so far, in order of place.
    """

    classes: Collection[int]
    count: int
    kept: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)

    def update(self, contents: Tensor, labels: Sequence[int], first: int) -> None:
        """Adds samples.

        Args:
            contents: [B, ...].
            labels: Class of each.
            first: Place of the first of them in the split; the others follow it.
        """
        for row, label in enumerate(labels):
            if label not in self.classes:
                continue
            own = self.kept.setdefault(label, [])
            if len(own) < self.count or first + row < own[-1][0]:
                own.append((first + row, contents[row].cpu().clone()))
                own.sort(key=lambda sample: sample[0])
                del own[self.count :]

    def gathered(self, processes: Processes) -> list[tuple[int, Tensor]]:
        """Class and content of the samples of all processes, class by class, in order of place."""
        parts = processes.map(lambda _: self.kept, range(processes.count))
        chosen = []
        for label in sorted(self.classes):
            samples = [sample for part in parts for sample in part.get(label, [])]
            chosen += [(label, content) for _, content in sorted(samples, key=lambda s: s[0])[: self.count]]
        return chosen


def spaced(tokens: Tensor, count: int = TOKENS) -> Tensor:
    """``count`` tokens of each sequence at even distances, [B, count, D] of [B, T, D]; all if there are no more."""
    length = tokens.size(1)
    if length <= count:
        return tokens
    return tokens[:, torch.arange(count, device=tokens.device) * length // count]


def shown_classes(num_classes: int) -> range:
    """Those in a scatter."""
    return range(min(CLASSES, num_classes))


def simplex_classes(num_classes: int) -> list[int]:
    """Three classes drawn at random, the same in all runs on a data set with ``num_classes`` classes."""
    return sorted(random.Random(mixed("simplex", num_classes)).sample(range(num_classes), 3))


def as_points(samples: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, list[int]]:
    """Tokens [N, D] and the class of each, of samples that are class and tokens [T, D]."""
    classes = [label for label, tokens in samples for _ in tokens]
    return torch.cat([tokens for _, tokens in samples]), classes


def png(image: Tensor) -> str:
    """A base64 PNG of an image [C, H, W] with values in 0..1, of one or three channels."""
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
