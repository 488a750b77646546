"""Analysis of variance of tokens against sums written out, in any batches, on one process and on two."""

import multiprocessing
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapbench.analysis import anova
from lapbench.analysis.anova import TokenANOVA

CLASSES, DIM = 6, 5
Batch = tuple[Tensor, Tensor]


def by_hand(batches: Iterable[Batch]) -> dict[str, float]:
    """Section 4.2's sums, token by token in float64."""
    seen = []  # token, its class, its sequence
    for tokens, labels in batches:
        for sequence, label in zip(tokens.double(), labels, strict=True):
            of_tokens = label.expand(len(sequence)).tolist()
            seen += [(x, c, sequence.mean(0)) for x, c in zip(sequence, of_tokens, strict=True) if c != -100]
    mean = torch.stack([x for x, _, _ in seen]).mean(0)
    of_class = {c: torch.stack([x for x, d, _ in seen if d == c]).mean(0) for _, c, _ in seen}
    three = next(iter(batches))[1].ndim == 1
    squares = {"within_class": 0.0, "between_class": 0.0} | ({"within_sequence": 0.0} if three else {})
    for x, c, of_sequence in seen:
        if three:
            squares["within_sequence"] += float((x - of_sequence).square().sum())
        squares["within_class"] += float(((of_sequence if three else x) - of_class[c]).square().sum())
        squares["between_class"] += float((of_class[c] - mean).square().sum())
    total = sum(float((x - mean).square().sum()) for x, _, _ in seen)
    return {name: value / total for name, value in squares.items()} | {"total": total / len(seen)}


def sequences(three: bool, seed: int = 0) -> list[Batch]:
    """Batches of sequences of several lengths; class 4 is empty, and some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(CLASSES, DIM, generator=generator, dtype=torch.float64) * 3
    batches = []
    for size, length in ((4, 7), (3, 1), (5, 2), (1, 9)):
        labels = torch.tensor([0, 1, 2, 3, 5, -100])[torch.randint(6, (size, length)[: 2 - three], generator=generator)]
        noise = torch.randn(size, length, DIM, generator=generator, dtype=torch.float64)
        of_class = spread[labels.clamp(min=0)]
        batches.append((noise + (of_class[:, None] if three else of_class), labels))
    return batches


def measured(batches: Iterable[Batch]) -> dict[str, float | None]:
    metric = TokenANOVA(CLASSES, DIM)
    for tokens, labels in batches:
        metric.update(tokens, labels)
    return metric.compute()


def close(expected: Any, rel: float = 1e-9) -> Any:
    return pytest.approx(expected, rel=rel, abs=1e-15)


@pytest.mark.parametrize("three", [True, False])
@pytest.mark.parametrize("at_once", [1, 3, 4096])
def test_it_is_the_sums_written_out(three: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anova, "AT_ONCE", at_once)
    batches = sequences(three)
    expected = by_hand(batches)
    found = measured(batches)
    assert found == close(expected)
    assert sum(value or 0 for name, value in found.items() if name != "total") == pytest.approx(1, abs=1e-14)
    assert list(found) == ["within_sequence", "within_class", "between_class", "total"][not three :]


@pytest.mark.parametrize("three", [True, False])
def test_batches_their_order_and_an_offset_change_nothing(three: bool) -> None:
    batches = sequences(three)
    expected = measured(batches)
    assert measured(reversed(batches)) == close(expected)
    assert measured([(t[i : i + 1], c[i : i + 1]) for t, c in batches for i in range(len(t))]) == close(expected)
    assert measured([(tokens + 1000, labels) for tokens, labels in batches]) == close(expected)
    # Classes that have all but collapsed, far from the origin.
    near = [(tokens * 1e-3 + 1000, labels) for tokens, labels in batches]
    assert measured(near) == close({**expected, "total": (expected["total"] or 0) * 1e-6}, rel=1e-8)


def test_tokens_of_two_bytes_are_summed_in_float64() -> None:
    batches = [(tokens.bfloat16(), labels) for tokens, labels in sequences(three=True)]
    assert measured(batches) == close(by_hand(batches))


@pytest.mark.parametrize("three", [True, False])
def test_one_way_analysis_of_three_groups(three: bool) -> None:
    tokens = torch.tensor([[1.0, 2, 3], [2, 3, 4], [5, 6, 7]])[:, :, None]
    labels = torch.arange(3)
    metric = TokenANOVA(3, 1)
    metric.update(tokens, labels if three else labels[:, None].expand(3, 3))
    within = {"within_sequence": 6 / 32, "within_class": 0} if three else {"within_class": 6 / 32}
    assert metric.compute() == close({**within, "between_class": 26 / 32, "total": 32 / 9}, rel=1e-14)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3])
@pytest.mark.parametrize("three", [True, False])
def test_constant_tokens_have_no_fractions(value: float, three: bool) -> None:
    found = measured([(torch.full_like(tokens, value), labels) for tokens, labels in sequences(three)])
    assert found.pop("total") == 0
    assert set(found.values()) == {None}
    assert len(found) == 2 + three


def test_degenerate_data_give_numbers() -> None:
    (tokens, _), *_ = sequences(three=True)
    one_class = measured([(tokens, torch.zeros(4, dtype=torch.int64))])
    assert one_class["between_class"] == close(0)
    single = measured([(tokens[:, :1], torch.arange(4))])
    assert (single["within_sequence"], single["within_class"], single["between_class"]) == (0, 0, 1)
    alone = measured([(tokens[:1, :1], torch.zeros(1, 1, dtype=torch.int64))])
    assert alone == {"within_class": None, "between_class": None, "total": 0}
    infinite = measured([(tokens, torch.arange(4)), (tokens / 0, torch.arange(4))])
    assert list(infinite.values()) == [None] * 4


def test_what_does_not_fit_is_refused() -> None:
    metric = TokenANOVA(3, 2)
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(ValueError, match="TokenANOVA: no"):
        metric.compute()
    for tokens, labels, reason in (
        ((2, 4, 3), torch.zeros(2), r"tokens \[B, T, 2\] with T at least 1, got \(2, 4, 3\)"),
        ((2, 0, 2), torch.zeros(2), r"got \(2, 0, 2\)"),
        ((8, 2), torch.zeros(8), r"got \(8, 2\)"),
        ((2, 4, 2), torch.zeros(4), r"expected labels \(2,\) or \(2, 4\), got \(4,\)"),
        ((2, 4, 2), torch.tensor([0, 3]), r"expected labels 0..2 or -100, got 3"),
        ((2, 4, 2), torch.tensor([-1, 0]), r"got -1"),
    ):
        with pytest.raises(ValueError, match=reason):
            metric.update(torch.zeros(tokens), labels)
    metric.update(torch.zeros(1, 2, 2), torch.tensor([-100]))
    with pytest.raises(ValueError, match="no tokens seen"):
        metric.compute()
    with pytest.raises(ValueError, match="labels of one kind"):
        metric.update(torch.zeros(1, 2, 2), torch.zeros(1, 2, dtype=torch.int64))
    other = TokenANOVA(3, 2)
    other.update(torch.zeros(1, 2, 2), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="labels of one kind"):
        metric.merge_state(other)


@pytest.mark.parametrize("three", [True, False])
def test_metrics_are_merged(three: bool) -> None:
    batches = sequences(three)
    expected = close(measured(batches))
    for cut in range(len(batches) + 1):
        parts = [TokenANOVA(CLASSES, DIM) for _ in range(2)]
        for metric, share in zip(parts, (batches[:cut], batches[cut:]), strict=True):
            for tokens, labels in share:
                metric.update(tokens, labels)
        one, other = parts
        before = {name: value.clone() for name, value in other.metric_state.items()}
        one.merge_state(other)
        one._update_count = 1  # torchmetrics counts merges as none
        assert one.compute() == expected
        assert all(torch.equal(value, before[name]) for name, value in other.metric_state.items())
        one.update(*batches[0])
        assert all(torch.equal(value, before[name]) for name, value in other.metric_state.items())


def test_it_is_a_metric_like_others() -> None:
    first, *others = sequences(three=True)
    metric = TokenANOVA(CLASSES, DIM)
    with torch.inference_mode():
        metric.update(*first)
    # A batch's own value, which adds the batch too; gradients neither needed nor kept.
    for tokens, labels in others:
        assert metric(tokens.requires_grad_(), labels) == close(measured([(tokens.detach(), labels)]))
    expected = close(measured([first, *((tokens.detach(), labels) for tokens, labels in others)]))
    assert metric.compute() == expected
    assert not any(value.requires_grad for value in metric.metric_state.values())
    assert metric.half().clone().compute() == expected
    assert pickle.loads(pickle.dumps(metric)).compute() == expected
    torch.nn.ModuleDict({"anova": metric}).to("meta")
    assert metric.class_sums.is_meta
    metric = TokenANOVA(CLASSES, DIM)
    assert metric.state_dict() == {}
    metric.update(*first)
    metric.persistent(True)
    loaded = TokenANOVA(CLASSES, DIM)
    loaded.load_state_dict(metric.state_dict())
    loaded.update(*sequences(three=True)[1])
    assert loaded.compute() == close(measured(sequences(three=True)[:2]))
    metric.reset()
    metric.update(*sequences(three=False)[0])
    assert metric.compute() == close(measured(sequences(three=False)[:1]))


class Largest(TorchDispatchMode):
    """The most numbers that the result of an operation has, but for those that are made to be the state."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {value.data_ptr() for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.data_ptr() not in given and func is not torch.ops.aten.zeros.default:
                self.numbers = max(self.numbers, value.numel())
        return result


@pytest.mark.parametrize("three", [True, False])
def test_one_matrix_of_classes_is_held_and_never_copied(three: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    classes = 3000
    monkeypatch.setattr(anova, "AT_ONCE", 64)
    metric, other = TokenANOVA(classes, DIM), TokenANOVA(classes, DIM)
    metric.distributed_available_fn = lambda: True
    metric.dist_sync_fn = lambda tensor, group: [tensor, tensor]
    with Largest() as largest:
        for one in (metric, other, metric):
            one.update(torch.randn(30, 4, DIM), torch.randint(classes, (30, 4)[: 2 - three]))
        metric.merge_state(other)
        metric.compute()
    assert largest.numbers <= 2 * classes  # numbers of tokens, of two processes
    held = [value for value in tree_leaves(vars(metric)) if isinstance(value, Tensor)]
    assert classes * DIM * 8 < sum(value.untyped_storage().nbytes() for value in held) < classes * (DIM + 2.1) * 8


def one_of_two(rank: int, folder: Path) -> None:
    """What a process of two does and must find."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    anova.AT_ONCE = 4  # two classes at a time
    for three in (True, False):
        batches = [(tokens + 1000, labels) for tokens, labels in sequences(three)]
        for cut in (0, 1, 3):
            metric = TokenANOVA(CLASSES, DIM)
            share = batches[:cut] if rank else batches[cut:]
            metric._update_count = 1  # so that one without data is not warned of
            for tokens, labels in share[:1]:
                metric.update(tokens, labels)
            metric.compute()
            # What was synchronized is put back.
            metric._computed = None
            for tokens, labels in share[1:]:
                metric.update(tokens, labels)
            assert metric.compute() == close(measured_alone(batches))
    metric = TokenANOVA(CLASSES, DIM)
    metric.update(*sequences(three=bool(rank))[0])
    with pytest.raises(ValueError, match="labels of one kind on all processes"):
        metric.compute()
    metric = TokenANOVA(CLASSES, DIM)
    metric._update_count = 1
    with pytest.raises(ValueError, match="no tokens seen"):
        metric.compute()


def measured_alone(batches: list[Batch]) -> dict[str, float | None]:
    """On this process only."""
    metric = TokenANOVA(CLASSES, DIM)
    metric.distributed_available_fn = bool
    for tokens, labels in batches:
        metric.update(tokens, labels)
    return metric.compute()


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    pair = [context.Process(target=one_of_two, args=(rank, tmp_path)) for rank in range(2)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(60)
    assert [process.exitcode for process in pair] == [0, 0]
