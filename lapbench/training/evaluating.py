"""The last part of ``lapbench fit``: the evaluations that the config names, on the checkpoint that the run declares."""

from collections.abc import Sequence
from functools import partial

from lapbench.evaluation import Evaluation
from lapbench.evaluation.after_fit import AfterFit
from lapbench.training.parser import CLI
from lapbench.training.recording import RecordWriter


def evaluate_after_fit(cli: CLI, writer: RecordWriter, evaluations: Sequence[Evaluation]) -> list[str]:
    """Runs ``evaluations``, those that the run's record lacks, and writes each into it.

    The run has been trained and tested, now or in an earlier start.

    Returns:
        The names of those that failed.
    """
    folder, trainer = cli.run_folder, cli.trainer
    assert folder.path is not None
    choice = folder.evaluated_checkpoint
    after = AfterFit(
        trainer, cli.model, cli.datamodule, writer.seed, folder.path, folder.checkpoint_file(choice), choice
    )
    try:
        return after.run(evaluations, partial(writer.evaluated, trainer))
    except BaseException as error:
        writer.on_exception(trainer, cli.model, error)
        raise
