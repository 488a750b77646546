"""What SIGTERM, SIGUSR1 and SIGINT do to a run: it saves its state and leaves with status 75, "start me again"."""

import signal
from types import FrameType

INTERRUPTED = 75
"""EX_TEMPFAIL: schedulers requeue it, `lapbench sweep` starts the run again."""
_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupted(SystemExit):
    """A stop signal arrived: leave with status 75.

    Attributes:
        together: Whether all processes of the run leave now, or this one alone knows of it.
    """

    def __init__(self, together: bool) -> None:
        super().__init__(INTERRUPTED)
        self.together = together


class StopSignals:
    """The handlers of one ``lapbench fit``.

    Outside of training a signal ends the process at once, as nothing would be lost. While training it is only noted,
    for a checkpoint to be written between two steps; a second one ends the process at once.

    Attributes:
        noted: Whether a signal arrived while training.
        deferring: Whether a signal is noted instead of acted on.
    """

    def __init__(self) -> None:
        self.noted = False
        self.deferring = False

    def install(self) -> None:
        """Sets the handlers; again after Lightning has set its own, which would end training without a checkpoint."""
        for number in _STOP:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.deferring and not self.noted:
            self.noted = True
            return
        # Schedulers repeat their signals; a second Ctrl-C does not wait for anything.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise Interrupted(together=False)
