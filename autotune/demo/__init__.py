"""The whole journey on a small real pipeline, which learns what it has never seen; judged by
geometry.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.demo.folders import Demo, make_demo
    from autotune.demo.lesson import ConceptFidelity, judge_lesson
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
