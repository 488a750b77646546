"""Similarity, spectra and principal components over two processes are those of one."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import Metric

from lapbench.analysis import TokenPCA, TokenSpectrum, WithinSequenceSimilarity

LENGTHS = (7, 4, 1, 7, 6)


def batches() -> list[torch.Tensor]:
    """Sequences of several lengths far from the origin."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, length, 5, generator=generator).double() * torch.logspace(0, -1, 5) + 1000 for length in LENGTHS
    ]


def measured(metric: Metric) -> Any:
    """Plain numbers, of all components at once where they are asked for."""
    if not isinstance(metric, TokenPCA):
        return metric.compute()
    found = metric.compute(3)
    return {
        "mean": found.mean.tolist(),
        "components": found.components.flatten().tolist(),
        "variances": found.variances.tolist(),
        "total": found.total,
    }


def metrics(alone: bool) -> list[Metric]:
    made = [WithinSequenceSimilarity(), TokenSpectrum(5), TokenPCA(5)]
    for metric in made if alone else ():
        metric.distributed_available_fn = bool
    return made


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            # Components and eigenvalues that are near 0 are of no use to the last bit of their own.
            assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-10), key
    else:
        assert found == pytest.approx(expected, rel=1e-9)


def one_of_two(rank: int, folder: Path) -> None:
    """What a process of two does and must find."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for cut in (0, 1, 3, 5):
        for metric, alone in zip(metrics(False), metrics(True), strict=True):
            metric.update(torch.ones(0, 7, 5).double())  # of a process that gets no data
            mine = batches()[:cut] if rank else batches()[cut:]
            for batch in mine[:1]:
                metric.update(batch)
            if cut == 3:
                measured(metric)  # what is synchronized for it is put back after it
            for batch in mine[1:]:
                metric.update(batch)
            for batch in batches():
                alone.update(batch)
            assert_close(measured(metric), measured(alone))


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
