"""How near features and classifier are to neural collapse."""

import torch
from torch import Tensor
from torchmetrics import Metric

IGNORED = -100  # torch's cross_entropy and the targets of language models have it
_EPS = torch.finfo(torch.float64).eps
_AT_ONCE = 2**24  # elements of a table of scores or cosines: 128 MiB


class _Measure(Metric):
    is_differentiable = False
    full_state_update = False

    @property
    def update_called(self) -> bool:
        """True always: a process without a sample computes too, and torchmetrics would warn of it."""
        return True


class NeuralCollapse(_Measure):
    """NC1 to NC3 of features of labelled samples (Han et al. 2021, arXiv 2106.02073; arXiv 2602.09297, appendix D).

    Sigma_W is the covariance within classes over all N samples; Sigma_B = M^T M / C that of the class means over
    classes, with M [C, D] the class means less their own mean (each class counts alike, however large it is). C is the
    number of classes seen: others are left out of M and of the classifier's rows.

    - ``nc1``: tr(Sigma_W Sigma_B^+) / C, with a pseudo-inverse of rank C - 1, or D where that is less. Directions that
      the means do not span, up to rounding, are left out.
    - ``nc2_equinorm_*``: standard deviation (ddof 1) / mean of the norms of the rows of M or W.
    - ``nc2_equiangular_*``: mean of abs(cos + 1 / (C - 1)) over pairs of different rows of M or W.
    - ``nc3``: Frobenius norm of W / norm(W) - M / norm(M), 0 to 2.
    - ``classes``: the number seen.

    ``nc4`` needs the class means of all samples first: `nearest_mean_mismatch` makes the measure for a second pass.

    A value is None where its formula has none: all of them for one class; those of M for equal class means, those of W
    for zero weights, or where a single row is zero (``nc2_equiangular_*``); those with W without a classifier.

    The state is float64, C (1 + D) + D^2 numbers whatever the number of samples, merged over batches and processes by
    the formula of Chan et al. (1983) for the moments of a union.

    Args:
        num_classes: Labels are 0 .. num_classes - 1.
        embed_dim: D.
    """

    moments: Tensor

    def __init__(self, num_classes: int, embed_dim: int) -> None:
        super().__init__(compute_with_cache=False)  # torchmetrics' cache does not look at the classifier
        self.num_classes, self.embed_dim = num_classes, embed_dim
        # One state, for torchmetrics reduces one at a time: what merges the means needs the counts.
        size = num_classes * (1 + embed_dim) + embed_dim**2
        self.add_state("moments", torch.zeros(size, dtype=torch.float64), dist_reduce_fx=self._union)

    def _parts(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views: samples [C], means [C, D] and the scatter around them [D, D]."""
        c, d = self.num_classes, self.embed_dim
        counts, means, scatter = torch.split(moments, [c, c * d, d * d])
        return counts, means.view(c, d), scatter.view(d, d)

    def _union(self, processes: Tensor) -> Tensor:
        """The moments of all samples from those of each process, [P, ...]."""
        union = processes[0].clone()
        counts, means, scatter = self._parts(union)
        for moments in processes[1:]:
            more, their_means, their_scatter = self._parts(moments)
            shift = _merge_means(counts, means, slice(None), more, their_means)
            scatter += their_scatter + shift.T @ shift
        return union

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Add samples.

        Args:
            features: [N, D], of any floating type; N may be 0.
            labels: [N], whole numbers; samples of label -100 are left out.

        Raises:
            ValueError: Shapes that do not fit, or a label that is no class.
        """
        _check_shapes(features, self.embed_dim, "labels", labels)
        labelled = labels != IGNORED
        if not labelled.all():
            features, labels = features[labelled], labels[labelled]
        if not labels.numel():
            return
        classes, own, more = torch.unique(labels, return_inverse=True, return_counts=True)
        _check_classes("labels", classes, self.num_classes)
        more = more.double()  # [K], of the batch's K classes
        # Relative to one of them, equal features are exactly zero, and sums keep the digits that an offset would take.
        origin = features[0].detach().to(torch.float64, copy=True)
        features = features.detach().to(torch.float64, copy=True).sub_(origin)
        batch_means = torch.zeros(len(classes), self.embed_dim, dtype=torch.float64, device=features.device)
        batch_means = batch_means.index_add_(0, own, features) / more[:, None]
        features -= batch_means[own]
        counts, means, scatter = self._parts(self.moments)
        shift = _merge_means(counts, means, classes, more, batch_means + origin)
        scatter.addmm_(features.T, features).addmm_(shift.T, shift)

    def compute(self, classifier: Tensor | None = None) -> dict[str, float | None]:
        """The measures above, with the classifier's weights [num_classes, D].

        Raises:
            ValueError: Nothing was seen, features are not finite, or the weights have another shape.
        """
        shape = (self.num_classes, self.embed_dim)
        if classifier is not None and classifier.shape != shape:
            raise ValueError(f"NeuralCollapse: expected classifier weights {shape}, got {tuple(classifier.shape)}")
        counts, means, scatter = self._parts(self.moments)
        seen = self._seen(counts)
        means = means[seen]
        # The rounding error of the means: smaller rows and directions of M are zero.
        zero = float(_EPS * max(means.shape) * means.norm())
        centred = means - means[0]
        centred -= centred.mean(dim=0)
        weights = None if classifier is None else classifier.detach().double().to(means.device)[seen]
        return {
            "nc1": _variability(scatter / counts.sum(), centred, zero),
            **{f"nc2_{name}_means": value for name, value in _frame(centred, zero).items()},
            **{f"nc2_{name}_classifier": value for name, value in _frame(weights, 0.0).items()},
            "nc3": _self_duality(weights, centred, zero),
            "classes": len(means),
        }

    def nearest_mean_mismatch(self) -> "NearestMeanMismatch":
        """The measure of NC4 with the class means of all processes' samples: all processes call it together.

        Raises:
            ValueError: Nothing was seen, or features are not finite.
        """
        with self.sync_context():
            counts, means, _ = self._parts(self.moments)
            return NearestMeanMismatch(means.clone(), self._seen(counts))

    def _seen(self, counts: Tensor) -> Tensor:
        if not counts.any():
            raise ValueError("NeuralCollapse: expected samples with labels before compute(), got none")
        if not self.moments.isfinite().all():
            raise ValueError("NeuralCollapse: expected finite features, got some that are not")
        return counts > 0


class NearestMeanMismatch(_Measure):
    """NC4: the share of samples that the classifier puts in another class than the nearest class mean does.

    It is for a second pass over the samples that the means come from (`NeuralCollapse.nearest_mean_mismatch`). Nearest
    is in the Euclidean sense, in float64; where the predicted class is among equally near ones, the two agree.

    Args:
        means: Class means, [C, D].
        seen: Which classes have a mean, [C]; all by default.

    Raises:
        ValueError: Shapes that do not fit, or no class has a mean.
    """

    origin: Tensor
    means: Tensor
    seen: Tensor
    mismatches: Tensor
    samples: Tensor

    def __init__(self, means: Tensor, seen: Tensor | None = None) -> None:
        super().__init__()
        seen = torch.ones(len(means), dtype=torch.bool, device=means.device) if seen is None else seen
        if means.ndim != 2 or seen.shape != means.shape[:1] or not seen.any():
            expected = "means [C, D] and at least one of C seen"
            raise ValueError(f"NearestMeanMismatch: expected {expected}, got {tuple(means.shape)} and {seen.tolist()}")
        means = means.double()
        self.register_buffer("origin", means[seen].mean(dim=0), persistent=False)
        self.register_buffer("means", means - self.origin, persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        self.add_state("mismatches", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, features: Tensor, predictions: Tensor) -> None:
        """Add samples.

        Args:
            features: [N, D], of any floating type; N may be 0.
            predictions: The class of the largest score of the classifier, [N].

        Raises:
            ValueError: Shapes that do not fit, or a prediction that is no class.
        """
        _check_shapes(features, self.means.size(1), "predictions", predictions)
        if not predictions.numel():
            return
        _check_classes("predictions", predictions, len(self.means))
        rows = max(1, _AT_ONCE // len(self.means))
        for part, predicted in zip(torch.split(features.detach(), rows), torch.split(predictions, rows), strict=True):
            # |x - mean|^2 = |x|^2 - 2 (x mean - |mean|^2 / 2): the nearest mean has the largest score.
            scores = (part.double() - self.origin) @ self.means.T - self.means.square().sum(dim=1) / 2
            scores.masked_fill_(~self.seen, -torch.inf)
            agree = scores.gather(1, predicted[:, None])[:, 0] >= scores.amax(dim=1)
            self.mismatches = self.mismatches + (~agree).sum()
        self.samples = self.samples + len(features)

    def compute(self) -> float:
        """The share, 0 to 1.

        Raises:
            ValueError: Nothing was seen.
        """
        if not self.samples:
            raise ValueError("NearestMeanMismatch: expected samples before compute(), got none")
        return float(self.mismatches / self.samples)


def _check_shapes(features: Tensor, embed_dim: int, name: str, labels: Tensor) -> None:
    if features.ndim != 2 or features.size(1) != embed_dim or labels.shape != features.shape[:1]:
        got = f"{tuple(features.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"expected features [N, {embed_dim}] and {name} [N], got {got}")


def _check_classes(name: str, classes: Tensor, num_classes: int) -> None:
    low, high = classes.aminmax()
    if low < 0 or high >= num_classes:
        raise ValueError(f"expected {name} of 0 .. {num_classes - 1}, got {int(low)} .. {int(high)}")


def _merge_means(counts: Tensor, means: Tensor, classes: Tensor | slice, more: Tensor, theirs: Tensor) -> Tensor:
    """Adds ``more`` samples [K] of means ``theirs`` [K, D] to K of the classes, in place.

    Returns:
        How far the two means of a class were apart, [K, D], with the weight that makes its squares the scatter to add.
    """
    before = counts[classes]
    after = before + more
    share = more / after.clamp(min=1)
    shift = theirs - means[classes]
    apart = (before * share).sqrt()[:, None] * shift
    means[classes] = means[classes] + share[:, None] * shift
    counts[classes] = after
    return apart


def _variability(covariance: Tensor, centred: Tensor, zero: float) -> float | None:
    """NC1 from Sigma_W [D, D] and M [C, D]: with M = U S V^T, Sigma_B^+ is C V S^-2 V^T, and its C cancels."""
    rank = len(centred) - 1
    _, singular, directions = torch.linalg.svd(centred, full_matrices=False)
    singular = singular[:rank][singular[:rank] > zero]
    directions = directions[: len(singular)]
    variances = ((directions @ covariance) * directions).sum(dim=1).clamp(min=0)
    return float((variances / singular / singular).sum()) if len(singular) else None


def _frame(rows: Tensor | None, zero: float) -> dict[str, float | None]:
    """NC2: how unequal the norms of rows [C, D] are, and how far the angles from those of a simplex ETF."""
    values: dict[str, float | None] = {"equinorm": None, "equiangular": None}
    if rows is None or len(rows) < 2:
        return values
    norms = rows.norm(dim=1)
    if (norms > zero).any():
        values["equinorm"] = float(norms.std() / norms.mean())  # ddof 1, as in the authors' code
    if (norms > zero).all():
        values["equiangular"] = _equiangularity(rows / norms[:, None])
    return values


def _equiangularity(units: Tensor) -> float:
    """Mean of abs(cos + 1 / (C - 1)) over all pairs of different rows [C, D], a part of the C x C cosines at a time."""
    classes, total = len(units), 0.0
    first = 0
    for part in torch.split(units, max(1, _AT_ONCE // classes)):
        deviations = (part @ units.T + 1 / (classes - 1)).abs()
        own = torch.arange(len(part), device=units.device)
        deviations[own, first + own] = 0
        total += float(deviations.sum())
        first += len(part)
    return total / (classes * (classes - 1))


def _self_duality(weights: Tensor | None, centred: Tensor, zero: float) -> float | None:
    """NC3 of W and M, both [C, D]."""
    if weights is None or centred.norm() <= zero or not weights.any():
        return None
    return float((weights / weights.norm() - centred / centred.norm()).norm())
