"""The projection on three classifier rows, where the answer is known and against a search over all turns."""

import math

import pytest
import torch

from lapbench.analysis.simplex import VERTICES, simplex_projection


def frame(dim: int) -> torch.Tensor:
    """Two orthonormal directions, [2, dim]."""
    return torch.linalg.qr(torch.randn(dim, 2, dtype=torch.float64)).Q.T


def test_the_vertices_are_a_simplex() -> None:
    assert torch.allclose(VERTICES @ VERTICES.T, torch.eye(3).double() * 1.5 - 0.5, atol=1e-15)
    assert VERTICES[0].tolist() == [0, 1]
    assert VERTICES[1, 0] < 0 < VERTICES[2, 0]


def test_rows_that_are_a_simplex_land_on_the_vertices_and_zero_on_the_centre() -> None:
    rows = 2.5 * VERTICES @ frame(16)
    assert torch.allclose(simplex_projection(rows, rows), 2.5 * VERTICES, atol=1e-12)
    assert simplex_projection(torch.zeros(1, 16), rows).abs().max() < 1e-12
    # A token's length outside the plane is not seen, that inside is kept.
    tokens = torch.randn(20, 16)
    plane = torch.linalg.pinv(rows) @ rows
    assert torch.allclose(simplex_projection(tokens, rows).norm(dim=1), (tokens.double() @ plane).norm(dim=1))


def test_three_rows_of_a_simplex_of_more_classes_land_on_the_vertices() -> None:
    classes = 10
    rows = torch.eye(classes).double() - 1 / classes
    for chosen in ([0, 1, 2], [7, 3, 5]):
        points = simplex_projection(rows, rows[chosen])
        assert torch.allclose(points[chosen], math.sqrt(2 / 3) * VERTICES, atol=1e-12)
        others = [c for c in range(classes) if c not in chosen]
        assert points[others].abs().max() < 1e-12


def test_no_other_turn_of_the_plane_is_nearer_to_the_vertices() -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 9, dtype=torch.float64)
    points = simplex_projection(rows, rows)
    distances = torch.cdist(rows, rows)
    assert torch.allclose(torch.cdist(points, points), distances, atol=1e-12)  # nothing but turned

    def fit(points: torch.Tensor) -> float:
        return float((points * VERTICES).sum())

    for step in range(1, 360):
        angle = math.radians(step)
        turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]).double()
        assert fit(points @ turn.T) < fit(points)
        assert fit(points @ turn.T * torch.tensor([-1.0, 1.0])) < fit(points)


def test_what_all_rows_share_changes_nothing_in_the_picture_of_the_rows() -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 6, dtype=torch.float64)
    shared = 1000 * torch.randn(6, dtype=torch.float64)
    moved = simplex_projection(rows + shared, rows + shared)
    assert torch.allclose(moved, simplex_projection(rows, rows), atol=1e-9)


def test_rows_without_a_plane_have_a_line_or_a_point() -> None:
    tokens = torch.randn(5, 4)
    equal = torch.full((3, 4), 0.1)
    assert simplex_projection(tokens, equal).tolist() == [[0, 0]] * 5
    line = torch.tensor([[1.0], [2.0], [4.0]]) * torch.ones(4)
    points = simplex_projection(tokens, line)
    assert torch.linalg.matrix_rank(points) == 1
    assert points.isfinite().all()
    assert simplex_projection(tokens[:, :1], line[:, :1]).shape == (5, 2)
    assert simplex_projection(tokens[:0], line).shape == (0, 2)


def test_halves_are_projected_in_double_precision() -> None:
    tokens, rows = torch.randn(7, 5).bfloat16(), torch.randn(3, 5).bfloat16()
    assert simplex_projection(tokens, rows).tolist() == simplex_projection(tokens.double(), rows.double()).tolist()


@pytest.mark.parametrize("shapes", [((4, 5), (2, 5)), ((4, 5), (3, 6)), ((4, 2, 5), (3, 5)), ((5,), (3, 5))])
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"expected tokens \[N, D\] and classifier rows \[3, D\], got \("):
        simplex_projection(torch.ones(shapes[0]), torch.ones(shapes[1]))
