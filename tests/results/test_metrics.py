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


def test_pass_at_k_is_a_number_k() -> None:
    assert kind_of("language/humaneval_pass@x").higher_is_better is None
