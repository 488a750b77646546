"""What DINO's teacher says of its own health."""

import math

import pytest
import torch

from lapbench.tasks.dino_health import collapse, entropy, feature_std, information

HEALTHY = {"loss": 5.0, "information": 1.5, "feature_std": 0.4, "out_dim": 512}


def test_entropy_and_information() -> None:
    uniform, certain = torch.full((6, 2, 8), 1 / 8), torch.eye(8)[torch.full((6, 2), 3)]
    assert entropy(uniform).item() == pytest.approx(math.log(8))
    assert entropy(certain).item() == 0
    for same in (uniform, certain):
        assert information(same).item() == pytest.approx(0, abs=1e-6)
    apart = torch.eye(8)  # eight images, each certain of another prototype
    assert information(apart).item() == pytest.approx(math.log(8))
    mixed = torch.tensor([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]])
    expected = -(0.5 * math.log(0.25) + 0.5 * math.log(0.5)) - math.log(2)
    assert information(mixed).item() == pytest.approx(expected)


def test_the_std_of_features_is_1_where_they_point_everywhere_and_0_where_they_are_one() -> None:
    everywhere = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    assert feature_std(everywhere).item() == pytest.approx(1, abs=0.01)
    assert feature_std(torch.rand(50, 1) * torch.ones(50, 16)).item() == pytest.approx(0, abs=1e-6)
    assert feature_std(everywhere.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"loss": math.log(512) + 0.004}, "the loss is at ln 512 "),
        ({"loss": 0.001, "information": 0.0}, "the loss is at 0, the teacher's outputs are the same for all images "),
        ({"feature_std": 0.003}, "the teacher's features are the same for all images "),
        ({"loss": 6.5}, None),  # before it has learned anything
        ({"loss": 0.05, "information": 3.0}, None),  # certain of another prototype for each image
    ],
)
def test_signs_of_a_collapse(change: dict[str, float], said: str | None) -> None:
    found = collapse(**{**HEALTHY, **change})
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"DINO has collapsed: {said}(loss ")
