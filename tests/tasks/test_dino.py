"""The DINO task against the published algorithm, written plainly."""

import pytest
import torch
from dino_runs import Crops, Steps, published, task, trainer
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]


@pytest.mark.parametrize("clip_norm", [3.0, 0.02])
def test_every_step_is_the_published_one(clip_norm: float) -> None:
    settings = {"clip_norm": clip_norm, "ema": 0.9}
    model, data, steps = task(**settings), Crops(4), Steps()
    trainer(max_epochs=3, callbacks=[steps]).fit(model, data)
    twin = task(**settings)
    expected = published(twin, [[batch] for batch in data.batches()] * 3, windows_per_epoch=4)
    assert [step["train/loss"] for step in steps.logged] == pytest.approx(expected["loss"], rel=1e-5)
    assert [step["train/grad_norm"] for step in steps.logged] == pytest.approx(expected["norm"], rel=1e-4)
    close(steps.centers, expected["center"])
    close(list(model.teacher.parameters()), list(twin.teacher.parameters()))
    close(list(model.student.parameters()), list(twin.student.parameters()))


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
