"""The line below a table that says what its numbers are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lapbench.results.metrics import SPLITS, MetricKind, base_of, kind_of, split_of
from lapbench.results.record import Record


def caption(
    metrics: Sequence[str],
    records: Sequence[Record],
    stages: Sequence[str],
    compared_with: str | None,
    references: Sequence[str] = (),
) -> str:
    """One line: metrics, split, stage, statistic, and which checkpoint was scored.

    Args:
        metrics: that the table shows.
        records: whose values it shows.
        stages: of the chains that they are in.
        compared_with: the baseline, if the table holds differences to it.
        references: names of the rows below the schedules.
    """
    data = {record.data for record in records}
    of = next(iter(data)) if len(data) == 1 else ""
    after = f"after stage {' or '.join(stages)}" if stages else ""
    parts = _one(metrics[0], of, after, records) if len(metrics) == 1 else _several(metrics, of, after, records)
    parts.append("mean ± standard deviation (ddof 1) over n seeds")
    # Runs that neither test nor evaluate have what the last epoch logged.
    checkpoints = Counter(record.checkpoint or "none" for record in records)
    if [*checkpoints] == ["none"]:
        parts.append("values of the last epoch")
    elif len(checkpoints) == 1:
        parts.append(f"checkpoint scored: {next(iter(checkpoints))}")
    elif checkpoints:
        counts = (f"{name} ({n} of {len(records)} runs)" for name, n in checkpoints.items())
        parts.append(f"checkpoints scored: {', '.join(counts)}")
    if compared_with:
        percent = {kind_of(metric).percent for metric in metrics}
        some = " (in points where the metric is in %)" if True in percent else ""
        points = " in points" if percent == {True} else some
        parts.append(f"Δ: difference to {compared_with}{points}, before rounding")
    if references:
        parts.append(f"for reference, neither ranked nor compared: {', '.join(references)}")
    return "; ".join(parts) + "."


def _one(metric: str, of: str, after: str, records: Sequence[Record]) -> list[str]:
    kind, split = kind_of(metric), split_of(metric)
    what = f"{metric}: {kind.title}{' in %' if kind.percent else ''}"
    what += f" on the {split} split" if split in SPLITS else ""
    what += f" of {of}" if of else ""
    what += f", by evaluation {_described(split, records)}" if split and split not in SPLITS else ""
    return [what + (f", {after}" if after else ""), _direction(kind)]


def _several(metrics: Sequence[str], of: str, after: str, records: Sequence[Record]) -> list[str]:
    """Those that have unit, source and direction in common share a part."""
    groups: dict[str, list[str]] = {}
    for metric in metrics:
        kind, split = kind_of(metric), split_of(metric)
        source = f"on the {split} split" if split in SPLITS else ""
        source = f"by evaluation {_described(split, records)}" if split and not source else source
        what = ", ".join(filter(None, ["in %" if kind.percent else "", source, _direction(kind)]))
        title = "" if kind.title == metric.rpartition("/")[2] else f" ({kind.title})"
        groups.setdefault(what, []).append(metric + title)
    common = [f"data: {of}"] if of else []
    common += [after] if after else []
    return [*(f"{', '.join(names)}: {what}" for what, names in groups.items()), *common]


def _direction(kind: MetricKind) -> str:
    if kind.higher_is_better is None:
        return "not ranked, as it is not known which direction is better"
    return f"{'higher' if kind.higher_is_better else 'lower'} is better"


def _described(evaluation: str, records: Sequence[Record]) -> str:
    """Its name and what it did, as far as its sections in the records say."""
    sections = [record.evaluations[evaluation] for record in records if evaluation in record.evaluations]
    words = list(dict.fromkeys(filter(None, (_did(base_of(evaluation), section) for section in sections))))
    return f"{evaluation} ({' or '.join(words)})" if words else evaluation


def _did(evaluation: str, section: Mapping[str, Any]) -> str:
    settings = section.get("settings", {})
    on = f"on the {settings['split']} split" if "split" in settings else ""
    if evaluation == "linear":
        held_out = "chosen on samples held out of training" if section.get("chosen_on") else ""
        return ", ".join(filter(None, [f"a linear classifier of frozen features {on}".strip(), held_out]))
    if evaluation == "knn":
        k = f", k = {settings['report_k']}" if "report_k" in settings else ""
        return f"weighted nearest neighbours of frozen features {on}".strip() + k
    if evaluation == "geometry":
        return f"tokens on the {section['split']} split" if "split" in section else ""
    if evaluation == "segmentation":
        return f"a head on the frozen backbone, data: {section['data']}" if "data" in section else ""
    return ""
