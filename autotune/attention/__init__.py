"""What happens to queries and keys before attention: norm, rotation and concatenation as one
function.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.attention.layout import ADDED_TEXT, AttentionLayout, Stream
    from autotune.attention.norm_rope import KERNELS
    from autotune.attention.processor import use_kernels
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
