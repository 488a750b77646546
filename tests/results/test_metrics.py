"""What metrics' names say: those of language evaluations are accuracies, printed in percent."""

import pytest

from lapbench.results.metrics import kind_of, show


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("language/arc_easy", "ARC-Easy"),
        ("language/arc_challenge", "ARC-Challenge"),
        ("language/arc_easy_acc_norm", "accuracy, by length"),
        ("language/mmlu", "MMLU"),
        ("language/gsm8k", "GSM8K"),
        ("language/gsm8k_flexible", "GSM8K, last number"),
        ("language-best/humaneval_pass@10", "HumanEval pass@10"),
        ("language/average", "average"),
    ],
)
def test_scores_of_language_models_are_percentages_of_which_more_is_better(metric: str, title: str) -> None:
    kind = kind_of(metric)
    assert (kind.title, kind.percent, kind.higher_is_better) == (title, True, True)
    assert show(0.315, kind) == "31.50"


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("linear/top1", "linear-probe top-1 accuracy"),
        ("linear-epoch-3/top5", "linear-probe top-5 accuracy"),
        ("knn/top1", "k-NN top-1 accuracy"),
        ("knn/top5_k200", "k-NN top-5 accuracy, k = 200"),
        ("segmentation/miou", "mean IoU over classes"),
        ("val/macc", "mean accuracy over classes"),
        ("segmentation/aacc", "accuracy over pixels"),
    ],
)
def test_scores_of_frozen_backbones_are_percentages_of_which_more_is_better(metric: str, title: str) -> None:
    kind = kind_of(metric)
    assert (kind.title, kind.percent, kind.higher_is_better) == (title, True, True)


def test_a_loss_of_a_probe_is_a_loss() -> None:
    assert kind_of("linear/loss").higher_is_better is False


def test_pass_at_k_is_a_number_k() -> None:
    assert kind_of("language/humaneval_pass@x").higher_is_better is None
