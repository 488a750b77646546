"""DINO's loss, its temperatures and the centre of its teacher."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapbench.errors import UserError


@dataclass
class Temperatures:
    """Temperatures of the two softmaxes.

    Args:
        student: The student's.
        teacher: The teacher's, lower: its outputs are sharpened.
        teacher_start: The teacher's in the first step of its warm-up.
        warmup_epochs: Length of the teacher's linear warm-up, which moves with every optimizer step.
    """

    student: float = 0.1
    teacher: float = 0.04
    teacher_start: float = 0.04
    warmup_epochs: float = 0.0

    def teacher_at(self, step: int, steps_per_epoch: int) -> float:
        """The teacher's temperature in optimizer step ``step`` (0-based)."""
        warmup = self.warmup_epochs * steps_per_epoch
        done = min(1.0, step / warmup) if warmup else 1.0
        return (1 - done) * self.teacher_start + done * self.teacher

    def check(self) -> None:
        """Raises:
        UserError: A setting out of range.
        """
        for name in ("student", "teacher", "teacher_start"):
            if not getattr(self, name) > 0:
                raise UserError(f"temperatures.{name}: expected a number above 0, got {getattr(self, name):g}")
        if self.warmup_epochs < 0:
            raise UserError(f"temperatures.warmup_epochs: expected at least 0, got {self.warmup_epochs:g}")


class DINOLoss(nn.Module):
    """Cross-entropy of each student view with each teacher view of another crop (arXiv 2104.14294, eq. 3, alg. 1).

    The teacher's logits less the centre (eq. 4), sharpened by its temperature, are the targets. Everything is computed
    in float32, under autocast too.

    Args:
        out_dim: Prototypes K.
        student_temperature: Temperature of the student.
        center_momentum: Momentum of the centre.
    """

    center: Tensor
    window: Tensor

    def __init__(self, out_dim: int, student_temperature: float = 0.1, center_momentum: float = 0.9) -> None:
        super().__init__()
        self.student_temperature = student_temperature
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(out_dim))
        # Sum of the teacher's logits over the optimizer step that is under way, and how many they are. In checkpoints
        # for the sake of one that is written within a step.
        self.register_buffer("window", torch.zeros(out_dim + 1))

    def targets(self, teacher: Tensor, temperature: float) -> Tensor:
        """Probabilities of the teacher's views; adds their logits to what the centre moves to next.

        Args:
            teacher: Logits of the global crops, [B, G, K].
            temperature: The teacher's temperature.

        Returns:
            [B, G, K].
        """
        logits = teacher.detach().float()
        self.window[:-1] += logits.sum(dim=(0, 1))
        self.window[-1] += logits.size(0) * logits.size(1)
        return ((logits - self.center) / temperature).softmax(dim=-1)

    def forward(self, student: Tensor, targets: Tensor) -> Tensor:
        """Mean over samples and pairs of views; the pair of a global crop with itself is not one.

        2 global and 8 local crops make 18 pairs. Uniform outputs give ln K.

        Args:
            student: Logits of all crops, the global ones first, [B, V, K], V at least 2.
            targets: The teacher's probabilities of the G global crops, [B, G, K].
        """
        views, global_views = student.size(1), targets.size(1)
        with torch.autocast(student.device.type, enabled=False):
            # What each student view is compared with, added up: all teacher views but its own.
            wanted = targets.sum(dim=1, keepdim=True).repeat(1, views, 1)
            wanted[:, :global_views] -= targets
            logs = (student.float() / self.student_temperature).log_softmax(dim=-1)
            return -(wanted * logs).sum(dim=(1, 2)).mean() / (global_views * (views - 1))

    @torch.no_grad()
    def move_center(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Moves the centre to the mean logits of the teacher over an optimizer step, all its micro-batches together.

        Args:
            add_up: Sums a tensor over processes.
        """
        total = add_up(self.window.clone())
        self.center.lerp_(total[:-1] / total[-1], 1 - self.center_momentum)
        self.window.zero_()
