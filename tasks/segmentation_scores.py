"""mIoU, mAcc and aAcc by mmsegmentation's ``IoUMetric``, summed over processes."""

import torch
from torch import Tensor
from torchmetrics import Metric

from lapbench.openmmlab import mmseg_imports

IGNORED = 255


class SegmentationScores(Metric):
    """Scores of a semantic segmentation over the labelled pixels of all images.

    The four areas of each class (intersection, union, predicted, labelled) are ``IoUMetric``'s, added up over images
    and processes in float64: the scores are the same for any number of processes. As there, a class that is neither
    predicted nor labelled counts in no mean.

    Args:
        num_classes: Number of classes C; the label 255 is ignored.
    """

    is_differentiable = False
    full_state_update = False
    areas: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        with mmseg_imports():
            from mmseg.evaluation import IoUMetric

        self.reference = IoUMetric
        self.num_classes = num_classes
        self.add_state("areas", torch.zeros(4, num_classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, label: Tensor) -> None:
        """Adds one image: class indices of its pixels, both [H, W] or [1, H, W]."""
        areas = self.reference.intersect_and_union(predicted, label.to(predicted), self.num_classes, IGNORED)
        self.areas += torch.stack(areas).to(self.areas)

    def compute(self) -> dict[str, Tensor]:
        """``miou``, ``macc`` and ``aacc`` as fractions, float64 scalars."""
        found = self.reference.total_area_to_metrics(*self.areas.cpu())
        classes = {name: torch.from_numpy(found[key]).nanmean() for name, key in (("miou", "IoU"), ("macc", "Acc"))}
        return {**classes, "aacc": torch.tensor(float(found["aAcc"]), dtype=torch.float64)}
