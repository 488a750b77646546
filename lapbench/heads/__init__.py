"""Head kinds, the schedules that place them in a model, and the function that computes them."""

from lapbench.heads.kinds import HeadKind
from lapbench.heads.schedule import HeadSchedule

__all__ = ["HeadKind", "HeadSchedule"]
