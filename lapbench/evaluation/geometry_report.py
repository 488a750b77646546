"""What measures of token geometry have found: metrics, the record's section, and the data of the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from lapbench.analysis.pca import feature_maps
from lapbench.analysis.simplex import VERTICES, simplex_projection
from lapbench.backbones import Decoder, Pixels, VisionBackbone
from lapbench.evaluation.geometry_measures import GeometryMeasures
from lapbench.evaluation.geometry_samples import as_points, png, simplex_classes
from lapbench.evaluation.processes import Processes


@dataclass
class GeometryReport:
    """What was found, the same on all processes.

    Attributes:
        metrics: Of the last chosen layer, without what has no value.
        found: By measure, numbers of each layer, where a layer without a value has None.
        figures: By figure, its fields.
        left_out: By measure, why it has no value.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add_metrics(self, values: Mapping[str, float | None]) -> None:
        """Adds those that have a value."""
        self.metrics |= {name: value for name, value in values.items() if value is not None}


def report(
    measures: GeometryMeasures, processes: Processes, pixels: tuple[Any, Any] = ((0.0,), (1.0,))
) -> GeometryReport:
    """Computes everything; called by all processes together.

    Args:
        measures: All samples have been added, and ``start_mismatch`` was called.
        processes: Those that share the samples.
        pixels: Mean and standard deviation that images were normalised by, for each channel.
    """
    out = GeometryReport()
    _anova(measures, out)
    if sum(processes.map(lambda _: measures.whole, range(processes.count))):
        _sequences(measures, out)
        _sublayers(measures, out)
    else:
        names = {"similarity", "spectrum", "sublayers"} & set(measures.chosen.measures)
        out.left_out |= dict.fromkeys(sorted(names), "no window is predicted up to its end")
    _collapse(measures, out)
    _scatter(measures, processes, out)
    _simplex(measures, processes, out)
    _maps(measures, processes, pixels, out)
    return out


def series(backbone: VisionBackbone | Decoder, seed: int | None) -> dict[str, Any]:
    """What every figure says of a run."""
    schedule = backbone.schedule
    base: dict[str, Any]
    if isinstance(backbone, Pixels):
        base = {"label": "pixels", "laplacian_heads": None, "reference": True}
    else:
        base = {"label": schedule.name, "laplacian_heads": schedule.count("L") / schedule.num_layers}
    return {**base, "schedule": schedule.name, "num_heads": backbone.num_heads, "seed": seed}


def _anova(measures: GeometryMeasures, out: GeometryReport) -> None:
    if not measures.anova:
        return
    of_layers = [anova.compute() for anova in measures.anova]
    levels = [level for level in ("within_sequence", "within_class", "between_class") if level in of_layers[-1]]
    out.add_metrics({level: of_layers[-1][level] for level in levels})
    fields = {"layers": list(measures.anova_layers), **_lists(of_layers, levels)}
    out.found["anova"] = {**fields, **_lists(of_layers, ["total"])}
    out.figures["anova"] = {"within_sequence": None, **fields}


def _sequences(measures: GeometryMeasures, out: GeometryReport) -> None:
    if measures.similarity:
        values = [similarity.compute() for similarity in measures.similarity]
        out.add_metrics({"similarity": values[-1]})
        out.found["similarity"] = {"layers": list(measures.chosen.layers), "similarity": values}
        out.figures["similarity"] = out.found["similarity"]
    if measures.spectrum is not None:
        result = measures.spectrum.compute()
        out.add_metrics({"k_alpha": result["k_alpha"]})
        # No sequence has more; the metric has room for sequences of any length.
        kept = min(measures.length, len(result["eigenvalues_mean"]))
        curves = {name: result.pop(name) for name in ("eigenvalues_mean", "eigenvalues_std")}
        out.found["spectrum"] = {"layer": measures.chosen.layers[-1], "alpha": measures.chosen.alpha, **result}
        out.figures["spectrum"] = {
            **{name: curve and curve[:kept] for name, curve in curves.items()},
            **{name: out.found["spectrum"][name] for name in ("alpha", "k_alpha", "k_alpha_std")},
        }


def _sublayers(measures: GeometryMeasures, out: GeometryReport) -> None:
    if measures.sublayers is None:
        return
    result: Any = measures.sublayers.compute()
    layers = list(measures.chosen.layers)
    by_kind = {
        kind: {name: [values[layer] for layer in layers] for name, values in of_kind.items()}
        for kind, of_kind in result.pop("by_kind").items()
    }
    stages = {name: [values[layer] for layer in layers] for name, values in result.items()}
    out.found["sublayers"] = out.figures["sublayers"] = {"layers": layers, **stages, "by_kind": by_kind}


def _collapse(measures: GeometryMeasures, out: GeometryReport) -> None:
    if not measures.collapse:
        return
    classifier = measures.classifier.weight if measures.reads_classifier and measures.classifier is not None else None
    last = len(measures.collapse) - 1
    of_layers = [
        {"nc4": None, **collapse.compute(classifier if i == last else None)}
        for i, collapse in enumerate(measures.collapse)
    ]
    if measures.mismatch is not None:
        of_layers[-1]["nc4"] = measures.mismatch.compute()
    names = sorted(of_layers[-1].keys() - {"classes"})
    out.add_metrics({name: of_layers[-1][name] for name in names})
    unit = measures.chosen.unit
    out.found["collapse"] = {
        "layers": list(measures.chosen.layers),
        "unit": unit,
        "classes": of_layers[-1]["classes"],
        **_lists(of_layers, names),
    }
    out.figures["collapse"] = {"unit": unit, **{name: of_layers[-1][name] for name in names}}


def _scatter(measures: GeometryMeasures, processes: Processes, out: GeometryReport) -> None:
    if measures.pca is None or measures.scatter is None:
        return
    samples = measures.scatter.gathered(processes)
    components = measures.pca.compute(2)
    explained: list[float] | list[None] = components.explained or [None, None]
    out.found["pca"] = {"layer": measures.chosen.layers[-1], "explained": explained}
    if not samples:
        out.left_out["pca figure"] = f"no sample of classes 0 to {max(measures.scatter.classes)} was seen"
        return
    tokens, classes = as_points(samples)
    points = components.project(tokens.to(components.mean.device))
    out.figures["pca"] = {
        "points": points.tolist(),
        "classes": classes,
        "class_names": None,
        "explained": explained,
    }


def _simplex(measures: GeometryMeasures, processes: Processes, out: GeometryReport) -> None:
    if measures.simplex is None:
        return
    chosen = simplex_classes(measures.num_classes)
    out.found["simplex"] = {"classes": chosen}
    samples = measures.simplex.gathered(processes)
    if not samples:
        out.left_out["simplex"] = f"no sample of classes {', '.join(map(str, chosen))} was seen"
        return
    tokens, classes = as_points(samples)
    assert measures.classifier is not None
    out.figures["simplex"] = {
        "points": simplex_projection(tokens, measures.classifier.weight[chosen].detach().cpu()).tolist(),
        "classes": [chosen.index(label) for label in classes],
        "chosen": chosen,
        "vertices": VERTICES.tolist(),
    }


def _maps(measures: GeometryMeasures, processes: Processes, pixels: tuple[Any, Any], out: GeometryReport) -> None:
    if measures.maps is None or measures.images is None:
        return
    tokens = [content for _, content in measures.maps.gathered(processes)]
    images = [content for _, content in measures.images.gathered(processes)]
    named = processes.map(lambda _: measures.keys, range(processes.count))
    keys = [key for _, key in sorted(item for part in named for item in part.items())]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in pixels)
    grid = _grid(cast(VisionBackbone, measures.backbone), images[0])
    out.found["feature_maps"] = {"layer": measures.chosen.layers[-1], "keys": keys}
    out.figures["feature_maps"] = {
        "images": [png(image * std + mean) for image in images],
        "maps": [feature_maps(patches, grid).tolist() for patches in tokens],
        "keys": keys,
    }


def _grid(backbone: VisionBackbone, image: Tensor) -> tuple[int, int]:
    """Rows and columns of patches of an image [C, H, W]."""
    patch: Any = backbone.patch_size if isinstance(backbone, Pixels) else backbone.patch_embed.patch_size  # type: ignore[union-attr]
    height, width = (patch, patch) if isinstance(patch, int) else patch
    return image.size(1) // height, image.size(2) // width


def _lists(of_layers: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [values[name] for values in of_layers] for name in names}
