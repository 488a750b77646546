"""Neural collapse against sums over single samples, in any order and on two processes."""

import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lapbench.analysis import collapse
from lapbench.analysis.collapse import NearestMeanMismatch, NeuralCollapse

MEANS = ("nc1", "nc2_equinorm_means", "nc2_equiangular_means")
WEIGHTS = ("nc2_equinorm_classifier", "nc2_equiangular_classifier")


def frame_by_hand(rows: Any) -> tuple[float, float]:
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    mean = sum(norms) / len(rows)
    deviation = math.sqrt(sum((norm - mean) ** 2 for norm in norms) / (len(rows) - 1))
    pairs = [(i, j) for i in range(len(rows)) for j in range(len(rows)) if i != j]
    angles = [abs(rows[i] @ rows[j] / (norms[i] * norms[j]) + 1 / (len(rows) - 1)) for i, j in pairs]
    return deviation / mean, sum(angles) / len(pairs)


def by_hand(features: Tensor, labels: Tensor, classifier: Tensor | None = None) -> dict[str, float | None]:
    """The formulas of the paper, sample by sample."""
    x, own = features.double().numpy(), labels.tolist()
    classes = sorted(set(own))
    means = {c: np.mean([x[i] for i in range(len(x)) if own[i] == c], axis=0) for c in classes}
    within = sum(np.outer(x[i] - means[c], x[i] - means[c]) for i, c in enumerate(own)) / len(x)
    centre = np.mean(list(means.values()), axis=0)
    m = np.stack([means[c] - centre for c in classes])
    between = sum(np.outer(row, row) for row in m) / len(classes)
    values, vectors = np.linalg.eigh(between)
    rank = min(len(classes) - 1, x.shape[1])
    inverse = vectors[:, -rank:] @ np.diag(1 / values[-rank:]) @ vectors[:, -rank:].T
    found: dict[str, float | None] = {"nc1": float(np.trace(within @ inverse)) / len(classes), "classes": len(classes)}
    found |= dict(zip(MEANS[1:], frame_by_hand(m), strict=True))
    found |= dict.fromkeys((*WEIGHTS, "nc3"))
    if classifier is not None:
        w = classifier.double().numpy()[classes]
        found |= dict(zip(WEIGHTS, frame_by_hand(w), strict=True))
        found["nc3"] = float(np.linalg.norm(w / np.linalg.norm(w) - m / np.linalg.norm(m)))
    return found


def data(num_classes: int = 6, dim: int = 9, samples: int = 200, unseen: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels of classes of unequal sizes, one of them empty, and a classifier."""
    generator = torch.Generator().manual_seed(num_classes + dim)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    labels = (torch.rand(samples, **options).square() * num_classes).long()
    labels[labels == unseen] = 0
    features = torch.randn(num_classes, dim, **options)[labels] + 0.3 * torch.randn(samples, dim, **options)
    return features, labels, torch.randn(num_classes, dim, **options)


def measured(features: Tensor, labels: Tensor, classifier: Tensor | None = None, **sizes: int) -> dict[str, Any]:
    metric = NeuralCollapse(sizes.get("num_classes", 6), features.size(1))
    metric.update(features, labels)
    return metric.compute(classifier)


def near(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-9) -> bool:
    """The same keys, None in the same places, and numbers that differ by rounding."""
    nothing = {key for key, value in expected.items() if value is None}
    numbers = {key: value for key, value in expected.items() if key not in nothing}
    assert {key for key, value in found.items() if value is None} == nothing
    assert {key: value for key, value in found.items() if key not in nothing} == pytest.approx(numbers, rel=rel)
    return True


def simplex(num_classes: int, dim: int) -> Tensor:
    """A simplex ETF, [C, dim]."""
    basis = torch.linalg.qr(torch.randn(dim, num_classes, dtype=torch.float64)).Q.T
    return (torch.eye(num_classes, dtype=torch.float64) - 1 / num_classes) @ basis


@pytest.mark.parametrize(("num_classes", "dim"), [(6, 9), (6, 3), (2, 4), (40, 12)])
def test_it_is_what_the_formulas_give(num_classes: int, dim: int) -> None:
    features, labels, classifier = data(num_classes, dim, unseen=2)
    expected = by_hand(features, labels, classifier)
    assert near(measured(features, labels, classifier, num_classes=num_classes), expected)
    without = measured(features, labels, num_classes=num_classes)
    assert near(without, by_hand(features, labels))
    assert [without[key] for key in (*WEIGHTS, "nc3")] == [None] * 3


def test_order_batches_and_an_offset_do_not_matter() -> None:
    features, labels, classifier = data()
    expected = measured(features, labels, classifier)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    for offset in (0, 1000):
        for sizes in ([1] * 200, [7, 0, 150, 43]):
            metric = NeuralCollapse(6, 9)
            for part in order.split(sizes):
                metric.update(features[part] + offset, labels[part])
            assert near(metric.compute(classifier), expected)
    assert metric.moments.numel() == 6 + 6 * 9 + 9 * 9
    assert metric.clone().compute(classifier) == metric.compute(classifier)
    metric.reset()
    for part in order.split(50):
        metric(features[part], labels[part])  # torchmetrics' own way, which merges states
    assert near(metric.compute(classifier), expected)


@pytest.mark.parametrize("offset", [0, 1000])
def test_small_noise_is_measured_beside_large_means(offset: int) -> None:
    generator = torch.Generator().manual_seed(0)
    means = 5 * torch.randn(10, 64, generator=generator, dtype=torch.float64)
    labels = torch.arange(10).repeat(50)
    features = means[labels] + 1e-3 * torch.randn(500, 64, generator=generator, dtype=torch.float64)
    found = measured(features + offset, labels, num_classes=10)
    assert found["nc1"] == pytest.approx(6e-9, rel=0.2)
    # 1000 leaves 1e-13 of the features' digits, 1e-10 of the noise.
    assert near(found, measured(features, labels, num_classes=10))


def test_a_perfect_simplex_is_collapsed() -> None:
    means, labels = simplex(5, 12), torch.arange(5).repeat(3)
    metric = NeuralCollapse(5, 12)
    metric.update(3 * means[labels] + 1, labels)
    found = metric.compute(0.7 * means)
    assert found.pop("classes") == 5
    assert found == pytest.approx(dict.fromkeys(found, 0), abs=1e-13)
    second = metric.nearest_mean_mismatch()
    second.update(3 * means[labels] + 1, (3 * means[labels] @ means.T).argmax(dim=1))
    assert second.compute() == 0
    found = metric.compute(-means)
    assert found["nc3"] == pytest.approx(2)


def test_lower_precision_is_summed_in_double() -> None:
    features, labels, classifier = data()
    for dtype in (torch.bfloat16, torch.float32):
        rounded = features.to(dtype)
        metric = NeuralCollapse(6, 9)
        metric.update(rounded, labels)
        assert metric.moments.dtype == torch.float64
        expected = by_hand(rounded, labels, classifier.to(dtype))
        assert near(metric.compute(classifier.to(dtype)), expected)


def test_features_are_left_as_they_are_and_get_no_gradient() -> None:
    features, labels, _ = data()
    features.requires_grad_()
    metric = NeuralCollapse(6, 9)
    before = features.detach().clone()
    metric.update(features, labels)
    assert torch.equal(features, before)
    assert not metric.moments.requires_grad


def test_ignored_labels_are_left_out() -> None:
    features, labels, classifier = data()
    kept = torch.arange(200) % 3 > 0
    expected = measured(features[kept], labels[kept], classifier)
    metric = NeuralCollapse(6, 9)
    metric.update(features, labels.where(kept, -100))
    metric.update(features, torch.full_like(labels, -100))
    assert near(metric.compute(classifier), expected)


def test_what_has_no_value_is_none() -> None:
    constant, classifier = torch.full((7, 4), 0.1), torch.randn(3, 4)
    metric = NeuralCollapse(3, 4)
    for size in (1, 2, 4):
        metric.update(constant[:size], torch.arange(size) % 3)
    found = metric.compute(classifier)
    assert [found[key] for key in (*MEANS, "nc3")] == [None] * 4
    assert all(found[key] > 0 for key in WEIGHTS)

    one = measured(torch.randn(5, 4), torch.ones(5).long(), classifier, num_classes=3)
    assert one.pop("classes") == 1
    assert set(one.values()) == {None}

    untrained = measured(torch.randn(9, 4), torch.arange(9) % 3, torch.zeros(3, 4), num_classes=3)
    assert [untrained[key] for key in (*WEIGHTS, "nc3")] == [None] * 3
    assert all(untrained[key] > 0 for key in MEANS)


def test_degenerate_class_means_give_numbers_that_are_right() -> None:
    line = torch.tensor([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]], dtype=torch.float64)
    single = measured(line, torch.arange(3), line, num_classes=3)  # a sample a class; the middle mean is the centre
    assert (single["nc1"], single["nc2_equiangular_means"]) == (0, None)
    assert single["nc2_equinorm_means"] == pytest.approx(math.sqrt(3) / 2)  # norms 1, 0, 1
    # A variance of 1 along the line, and means whose squares sum to 8; what is across has no mean to be compared with.
    across = torch.tensor([[2.0, -1.0], [-2.0, 1.0]]).double().repeat(6, 1)
    noise = torch.tensor([[1.0, 2.0], [-1.0, -2.0]]).double().repeat_interleave(6, dim=0) + across
    features, labels = (
        line.repeat_interleave(2, dim=0).repeat(2, 1) + noise,
        torch.arange(3).repeat_interleave(2).repeat(2),
    )
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]]).double()
    for offset in (0, 1000):  # where rounding gives the means a second direction
        spread = measured(features @ turn + offset, labels, num_classes=3)
        assert spread["nc1"] == pytest.approx(1 / 8, rel=1e-9)


def test_many_classes_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, classifier = data(40, 12)
    monkeypatch.setattr(collapse, "_AT_ONCE", 300)
    expected = by_hand(features, labels, classifier)
    assert near(measured(features, labels, classifier, num_classes=40), expected)


def mismatch_by_hand(features: Tensor, labels: Tensor, predictions: Tensor) -> float:
    classes = sorted(set(labels.tolist()))
    means = [features[labels == c].mean(dim=0) for c in classes]
    nearest = [classes[min(range(len(classes)), key=lambda k: float((x - means[k]).norm()))] for x in features]
    return sum(a != b for a, b in zip(nearest, predictions.tolist(), strict=True)) / len(features)


@pytest.mark.parametrize("at_once", [2**24, 50, 1])
def test_the_nearest_class_mean_is_compared_with_the_prediction(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "_AT_ONCE", at_once)
    features, labels, classifier = data()
    predictions = labels.where(features[:, 0] < 0.5, (features @ classifier.T).argmax(dim=1))
    expected = mismatch_by_hand(features, labels, predictions)
    assert 0.1 < expected < 0.9
    for offset in (0, 1000):
        first = NeuralCollapse(6, 9)
        first.update(features + offset, labels)
        second = first.nearest_mean_mismatch()
        for part in torch.arange(200).split([60, 0, 140]):
            second.update(features[part] + offset, predictions[part])
        assert second.compute() == expected


def test_classes_without_a_mean_and_equally_near_ones() -> None:
    means = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 0.0]])
    metric = NearestMeanMismatch(means, torch.tensor([True, True, False]))
    between = torch.tensor([[1.0, 0.0]])
    for predicted, expected in ((0, 0), (1, 0), (2, 1)):
        metric.reset()
        metric.update(between, torch.tensor([predicted]))
        assert metric.compute() == expected
    assert metric.to("cpu").means.dtype == torch.float64
    with pytest.raises(ValueError, match=r"means \[C, D\] and at least one of C seen, got \(3, 2\) and \[False"):
        NearestMeanMismatch(means, torch.zeros(3).bool())


def test_mistakes_are_named() -> None:
    metric = NeuralCollapse(3, 4)
    with pytest.raises(ValueError, match=r"NeuralCollapse: expected samples with labels before compute\(\), got none"):
        metric.compute()
    with pytest.raises(ValueError, match=r"got \(2, 5\) and \(2,\)"):
        metric.update(torch.ones(2, 5), torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"expected features \[N, 4\] and labels \[N\], got \(2, 4\) and \(3,\)"):
        metric.update(torch.ones(2, 4), torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"expected labels of 0 .. 2, got 1 .. 3"):
        metric.update(torch.ones(2, 4), torch.tensor([1, 3]))
    metric.update(torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"expected classifier weights \(3, 4\), got \(2, 4\)"):
        metric.compute(torch.ones(2, 4))
    second = metric.nearest_mean_mismatch()
    with pytest.raises(ValueError, match=r"NearestMeanMismatch: expected samples before compute\(\), got none"):
        second.compute()
    with pytest.raises(ValueError, match=r"expected predictions of 0 .. 2, got -1 .. 0"):
        second.update(torch.ones(2, 4), torch.tensor([0, -1]))
    metric.update(torch.tensor([[0.0, math.nan, 0.0, 0.0]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="expected finite features"):
        metric.compute()


def one_of_two(rank: int, folder: Path, found: Any) -> None:
    """A process of two: its share is all but the last 11, all, or none of the samples."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    features, labels, classifier = data()
    predictions = (features @ classifier.T).argmax(dim=1)
    results = []
    for cut in (189, 200, 0):
        share = slice(cut) if rank == 0 else slice(cut, None)
        metric = NeuralCollapse(6, 9)
        if labels[share].numel():
            metric.update(features[share], labels[share])
        second = metric.nearest_mean_mismatch()
        if labels[share].numel():
            second.update(features[share], predictions[share])
        results.append(metric.compute(classifier) | {"nc4": second.compute()})
    found.put(results)
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path, found)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
    features, labels, classifier = data()
    predictions = (features @ classifier.T).argmax(dim=1)
    expected = by_hand(features, labels, classifier) | {"nc4": mismatch_by_hand(features, labels, predictions)}
    first, second = found.get(), found.get()
    assert first == second
    for result in first:
        assert near(result, expected)
