"""Wan 2.2 of 14B parameters: Wan 2.1's architecture twice, one transformer for much noise and one
for little.

A run trains one of them, on noise of its own side of the boundary alone; both sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from autotune.errors import InvalidInput
from autotune.families.base import Config, Family, Parts, PublishedModel
from autotune.families.noise import FlowMatching, NoiseProcess
from autotune.families.wan import UMT5, Wan, Wan21
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image

BOUNDARY = 0.875
"""Share of noise from which one transformer of the published model denoises, and below which the
other.
"""


class Wan22HighNoise(Wan):
    """Wan 2.2 of 14B parameters, at 480p: the transformer for much noise."""

    name = "wan-2.2-14b"
    expert = "high-noise"
    other_denoisers = ("transformer_2",)
    components = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
    models = (
        PublishedModel(
            "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
            {},
            Parts(UMT5, "AutoencoderKLWan"),
            num_parameters=14_288_491_584,
            license="apache-2.0",
            source="wan/configs/wan_t2v_A14B.py in Wan-Video/Wan2.2@42bf4cf; 28.6 GB in fp16 each",
            note=(
                "two transformers of this size: a run trains one of them, --expert high-noise "
                "(default) or low-noise"
            ),
        ),
    )
    pipeline_config: ClassVar[Config] = {"expand_timesteps": None, "boundary_ratio": BOUNDARY}
    size_multiple_px = 16
    noise: ClassVar[NoiseProcess] = FlowMatching(lowest_share=BOUNDARY)
    defaults = replace(
        Wan21.defaults,
        timestep_shift=12.0,
        sampling_guidance=4.0,
        sources={
            "timestep_shift": "the configuration in Wan-Video/Wan2.2",
            "sampling_guidance": "the same",
        },
    )

    @property
    def experts(self) -> Mapping[str, type[Family]]:
        return {"high-noise": Wan22HighNoise, "low-noise": Wan22LowNoise}

    def is_pipeline(self, index: Mapping[str, Any]) -> bool:
        return super().is_pipeline(
            {**index, "boundary_ratio": index.get("boundary_ratio") and BOUNDARY}
        )

    def noise_of(self, scheduler: Config, index: Config) -> NoiseProcess:
        boundary = index.get("boundary_ratio")
        if not isinstance(boundary, float) or not 0 < boundary < 1:
            hint = "it is a share of noise, as 0.875: download the model again"
            raise InvalidInput(f"model_index.json has the boundary_ratio {boundary!r}", hint=hint)
        return self._noise_beside(boundary)

    def _noise_beside(self, boundary: float) -> NoiseProcess:
        return FlowMatching(lowest_share=boundary)

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        usual = super().sampling_arguments(pipeline, prompt, bucket, controls)
        return {
            **usual,
            "guidance_scale_2": 0.75 * usual["guidance_scale"],
        }  # 3 and 4 in Wan-Video/Wan2.2


class Wan22LowNoise(Wan22HighNoise):
    """The transformer for little noise."""

    expert = "low-noise"
    denoiser = "transformer_2"
    other_denoisers = ("transformer",)
    adapter_options: ClassVar[Mapping[str, Any]] = {"load_into_transformer_2": True}
    noise: ClassVar[NoiseProcess] = FlowMatching(highest_share=BOUNDARY)

    @property
    def adapter_component(self) -> str:
        return "transformer"  # diffusers names the layers of both like the first's

    def _noise_beside(self, boundary: float) -> NoiseProcess:
        return FlowMatching(highest_share=boundary)
