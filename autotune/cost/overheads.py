"""What another program keeps on the device in phases in which autotune's executor has it
elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.schema import Overheads, PhaseMemory

if TYPE_CHECKING:
    from autotune.cost.memory import Resident

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
KEEP_ON = ("train", "preview", "save")
"""What training keeps is there to the end."""
VAE_IS_THERE = ("cache", "preview")


def kept_part_bytes(
    overheads: Overheads, resident: "Resident", *, vae_parameters: int, encoder_bytes: int
) -> Mapping[str, int]:
    """Bytes that each phase needs beyond what autotune's executor needs there.

    Args:
        overheads: of the program.
        resident: what stays on the device anyway.
        vae_parameters: of the VAE.
        encoder_bytes: of the text encoders' weights in bf16, as they are stored on the device; 0 if
            they are not there. While captions are encoded they are there anyway.
    """
    found: dict[str, int] = {}
    for one in overheads.kept:
        size = ELEMENT_BYTES[one.precision]
        for phase in KEEP_ON if one.phase == "train" else (one.phase,):
            num_bytes = {
                "transformer": resident.weight_bytes + resident.buffer_bytes
                if phase == "cache"
                else 0,
                "text_encoders": 0
                if phase == "cache"
                else encoder_bytes * size // ELEMENT_BYTES["bf16"],
                "vae": vae_parameters * size - (resident.vae_bytes if phase in VAE_IS_THERE else 0),
            }[one.part]
            found[phase] = found.get(phase, 0) + max(0, num_bytes)
    return found


def with_kept(phases: Sequence[PhaseMemory], kept: Mapping[str, int]) -> tuple[PhaseMemory, ...]:
    """The phases of a job with so many bytes more of weights."""

    def changed(phase: PhaseMemory) -> PhaseMemory:
        more = kept.get(phase.name, 0)
        breakdown = phase.breakdown.model_copy(
            update={"weight_bytes": phase.breakdown.weight_bytes + more}
        )
        sizes = {
            name: getattr(phase, name) + more
            for name in ("run_memory_bytes", "allocated_memory_bytes")
        }
        return phase.model_copy(update={**sizes, "breakdown": breakdown})

    return tuple(changed(phase) if phase.name in kept else phase for phase in phases)
