"""One file per tunable dimension: its choices here, why others are excluded, how to apply one."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.knobs.block_swap import Swapping, offload_on_arrival, region_offsets
    from autotune.knobs.caching import (
        PIN,
        EncoderSize,
        caching_choices,
        cast_refusal,
        choose_caching,
        describe_caching,
        encoder_gpu_of,
        size_of,
    )
    from autotune.knobs.checkpointing import apply_recomputation
    from autotune.knobs.compile import ELEMENTWISE_SHARE, LAUNCH_SHARE, startup_seconds
    from autotune.knobs.knob import (
        Choices,
        Knob,
        Parity,
        TuningContext,
        parity_capability,
        unavailable_reason,
    )
    from autotune.knobs.modulation import window_steps
    from autotune.knobs.modulation_ahead import ModulationAhead, find_modulation_ahead, take_layers
    from autotune.knobs.norm_rope import NormRope
    from autotune.knobs.optimizer import (
        allow_optimizer,
        build_optimizer,
        check_options,
        optimizer_bytes,
        optimizer_class,
        require_allowed,
        usual_learning_rate,
    )
    from autotune.knobs.quantization import Quantization
    from autotune.knobs.registry import (
        KNOBS,
        NAMES,
        PARITY,
        TITLES,
        reload_key,
        require_choice,
        unusable_reason,
    )
    from autotune.knobs.settings import (
        PLAIN_SETTINGS,
        configure_allocator,
        encoder_element_bytes,
        encoder_precision,
        plain_choices,
        precision_parity,
        torch_dtype,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
