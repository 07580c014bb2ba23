"""The parts of making a plan: what is asked, what it stands on, what is frozen, how it is replayed and sealed."""

from typing import TYPE_CHECKING

from autotune.runtime.lazy import lazy_exports

if TYPE_CHECKING:
    from autotune.planning.backend import PlannerBackend
    from autotune.planning.planner import make_plan
    from autotune.planning.problem import list_choices
    from autotune.planning.recording import read_recording, recording_of, replayed, write_recording
    from autotune.planning.request import PlanRequest, request_from
    from autotune.planning.sealing import seal_on_arrival, sealed_beside, sealed_path
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
