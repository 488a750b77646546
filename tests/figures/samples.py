"""Data of each figure as two runs would leave them: small, and with every field filled in."""

import base64
import copy
import io
from typing import Any

from PIL import Image

_stream = io.BytesIO()
Image.new("L", (2, 2), 90).save(_stream, format="PNG")
PNG = base64.b64encode(_stream.getvalue()).decode()

_BASE: dict[str, Any] = {"label": "0L", "schedule": "0L", "laplacian_heads": 0.0, "num_heads": 4, "seed": 0}
_KIND = {"variance": [1.1, 1.2], "mean_shift": [0.1, 0.1]}

SAMPLES: dict[str, dict[str, Any]] = {
    "accuracy": {"metric": "test/top1", "value": 0.9},
    "anova": {
        "layers": [0, 1],
        "within_sequence": [0.3, 0.2],
        "within_class": [0.3, 0.3],
        "between_class": [0.4, 0.5],
    },
    "similarity": {"layers": [0, 1], "similarity": [0.3, 0.6]},
    "spectrum": {
        "eigenvalues_mean": [9.0, 3.0, 1.0, 0.0],
        "eigenvalues_std": [1.0, 0.5, 2.0, 0.0],
        "alpha": 0.99,
        "k_alpha": 2.5,
        "k_alpha_std": 0.5,
    },
    "collapse": {
        "unit": "sequence mean",
        "nc1": 3.0,
        "nc2_equinorm_means": 0.2,
        "nc2_equiangular_means": 0.3,
        "nc2_equinorm_classifier": 0.1,
        "nc2_equiangular_classifier": 0.2,
        "nc3": 0.5,
        "nc4": 0.04,
    },
    "pca": {
        "points": [[0.0, 1.0], [1.0, 0.0], [-1.0, 0.5]],
        "classes": [0, 2, 2],
        "class_names": ["wren", "owl", "kite"],
        "explained": [0.5, 0.25],
    },
    "feature_maps": {"images": [PNG], "maps": [[[[0.0, 0.5, 1.0]] * 2] * 2], "keys": ["val/3"]},
    "simplex": {
        "points": [[0.0, 0.9], [-0.7, -0.4], [0.8, -0.5]],
        "classes": [0, 1, 2],
        "chosen": [3, 17, 42],
        "vertices": [[0.0, 1.0], [-0.866, -0.5], [0.866, -0.5]],
    },
    "sublayers": {
        "layers": [0, 1],
        "before_attention": [1.0, 2.0],
        "after_attention": [0.8, 1.5],
        "after_mlp": [1.2, 1.8],
        "by_kind": {"attention": _KIND, "laplacian": {"variance": None, "mean_shift": None}},
    },
}


def series(name: str, label: str = "0L", seed: int = 0, **fields: Any) -> dict[str, Any]:
    """One run's series of a figure; ``fields`` replace the sample's."""
    heads = float(label[:-1]) if label[:-1].isdecimal() else None
    return copy.deepcopy(
        {**_BASE, **SAMPLES[name], "label": label, "schedule": label, "laplacian_heads": heads, "seed": seed, **fields}
    )


def sample(name: str) -> dict[str, Any]:
    """The figure of two schedules."""
    return {"figure": name, "series": [series(name, "0L"), series(name, "2L")]}
