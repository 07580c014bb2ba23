"""Runs one candidate for a few real steps in a child process and classifies what happened."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.trials.fork_server import warm_up
    from autotune.trials.parity import check_parity
    from autotune.trials.runner import ProcessTrialRunner
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
