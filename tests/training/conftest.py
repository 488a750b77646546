"""Reading TensorBoard's event files."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def scalars() -> Callable[[Path], dict[str, dict[int, float]]]:
    """Values by tag and step of the event files in a folder; where a step was logged twice, the later value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> dict[str, dict[int, float]]:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False)
        events.Reload()
        return {tag: {item.step: item.value for item in events.Scalars(tag)} for tag in events.Tags()["scalars"]}

    return read
