"""What a metric's name says about it: title, unit, and which direction is better. Numbers as tables print them."""

import math
import re
from dataclasses import dataclass, replace

_TOP_OF_K = re.compile(r"(top[15])_k([0-9]+)")
_PASS_AT = re.compile(r"(.+_)?pass@[0-9]+")


@dataclass(frozen=True)
class MetricKind:
    """``percent``: a fraction that is printed in percent. ``higher_is_better``: None where nobody has said so."""

    title: str
    percent: bool = False
    higher_is_better: bool | None = None

    @property
    def unit(self) -> str:
        return " (%)" if self.percent else ""


KINDS: dict[str, MetricKind] = {
    "top1": MetricKind("top-1 accuracy", percent=True, higher_is_better=True),
    "top5": MetricKind("top-5 accuracy", percent=True, higher_is_better=True),
    "accuracy": MetricKind("accuracy", percent=True, higher_is_better=True),
    "acc_norm": MetricKind("accuracy, by length", percent=True, higher_is_better=True),
    "arc_easy": MetricKind("ARC-Easy", percent=True, higher_is_better=True),
    "arc_challenge": MetricKind("ARC-Challenge", percent=True, higher_is_better=True),
    "mmlu": MetricKind("MMLU", percent=True, higher_is_better=True),
    "gsm8k": MetricKind("GSM8K", percent=True, higher_is_better=True),
    "gsm8k_flexible": MetricKind("GSM8K, last number", percent=True, higher_is_better=True),
    "miou": MetricKind("mean IoU over classes", percent=True, higher_is_better=True),
    "macc": MetricKind("mean accuracy over classes", percent=True, higher_is_better=True),
    "aacc": MetricKind("accuracy over pixels", percent=True, higher_is_better=True),
    "average": MetricKind("average", percent=True, higher_is_better=True),
    "loss": MetricKind("loss", higher_is_better=False),
    "bits_per_byte": MetricKind("bits per byte", higher_is_better=False),
    "perplexity": MetricKind("perplexity", higher_is_better=False),
    # Token geometry is described, not judged: no direction.
    "within_sequence": MetricKind("within-sequence share of the tokens' variance"),
    "within_class": MetricKind("within-class share of the tokens' variance"),
    "between_class": MetricKind("between-class share of the tokens' variance"),
    "similarity": MetricKind("cosine similarity within sequences"),
    "k_alpha": MetricKind("dimensions that hold the share alpha of a sequence's variance"),
    "nc1": MetricKind("within-class variability (NC1)"),
    "nc2_equinorm_means": MetricKind("variation of class means' norms (NC2)"),
    "nc2_equiangular_means": MetricKind("deviation of class means from equal angles (NC2)"),
    "nc2_equinorm_classifier": MetricKind("variation of classifier rows' norms (NC2)"),
    "nc2_equiangular_classifier": MetricKind("deviation of classifier rows from equal angles (NC2)"),
    "nc3": MetricKind("distance of classifier from class means (NC3)"),
    "nc4": MetricKind("disagreement with the nearest class mean (NC4)"),
}
"""By the last part of a metric's name or its ending: "test/top1", "val/ema_loss". Add a metric's direction here."""

DEFAULTS = ("test/top1", "val/top1", "linear/top1", "knn/top1", "val/miou", "test/bits_per_byte", "val/bits_per_byte")
EVALUATIONS = {"linear": "linear-probe", "knn": "k-NN"}
"""What the titles of an evaluation's metrics begin with, where a table may show the task's own beside them."""

SPLITS = ("train", "val", "test")
"""What a metric's name begins with if it is the task's; any other beginning names an evaluation after training."""


def kind_of(metric: str) -> MetricKind:
    """The kind of a metric named "split/name"; one that `KINDS` does not know is printed but not ranked."""
    evaluation = base_of(split_of(metric) or "")
    kind = _kind_of(metric.rpartition("/")[2])
    if evaluation not in EVALUATIONS or kind.higher_is_better is None:
        return kind
    return replace(kind, title=f"{EVALUATIONS[evaluation]} {kind.title}")


def _kind_of(name: str) -> MetricKind:
    if match := _TOP_OF_K.fullmatch(name):
        return replace(_kind_of(match[1]), title=f"{_kind_of(match[1]).title}, k = {match[2]}")
    if _PASS_AT.fullmatch(name):
        return MetricKind(name.replace("humaneval_", "HumanEval "), percent=True, higher_is_better=True)
    for ending, kind in KINDS.items():
        if name == ending or name.endswith(f"_{ending}"):
            return kind
    return MetricKind(name)


def split_of(metric: str) -> str | None:
    """ "test" for "test/top1", "linear" (an evaluation) for "linear/top1", None for a name without either."""
    return metric.partition("/")[0] if "/" in metric else None


def base_of(evaluation: str) -> str:
    """ "linear" for "linear-epoch-3", the name that `lapbench evaluate --ckpt` gives it."""
    return evaluation.partition("-")[0]


def show(value: float, kind: MetricKind, scale: float | None = None, sign: bool = False) -> str:
    """``value`` in percent with two decimals, or with four significant digits.

    Args:
        value: finite.
        kind: the metric's kind.
        scale: the number whose four significant digits decide the decimals (default ``value``), so that a mean, its
            deviation and a difference line up.
        sign: write the plus of a positive number.
    """
    plus = "+" if sign else ""
    if kind.percent:
        text = f"{100 * value:{plus}.2f}"
    else:
        size = abs(value if scale is None else scale)
        exponent = math.floor(math.log10(size)) if size else 0
        text = f"{value:{plus}.{max(0, 3 - exponent)}f}" if -4 <= exponent < 7 else f"{value:{plus}.3e}"
    return text.lstrip("+-") if float(text) == 0 else text


def show_metrics(metrics: dict[str, float], name: str) -> str:
    """ "test/top1 96.94 %": one metric for a line of progress."""
    kind, value = kind_of(name), metrics[name]
    number = show(value, kind) if math.isfinite(value) else str(value)
    return f"{name} {number} %" if kind.percent else f"{name} {number}"
