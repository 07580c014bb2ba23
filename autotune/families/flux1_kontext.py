"""FLUX.1 Kontext [dev]: FLUX.1 [dev] for editing. The tokens of the control image follow those
of the image.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune.families.base import PublishedModel
from autotune.families.flux1_dev import DEV, DEV_LICENSE, DEV_PARTS, Flux1Dev
from autotune.schema import Bucket

if TYPE_CHECKING:
    from PIL import Image


class Flux1Kontext(Flux1Dev):
    """Edits one control image. Training and previews show it in the size of the image."""

    name = "flux1-kontext"
    models = (
        PublishedModel(
            "black-forest-labs/FLUX.1-Kontext-dev",
            DEV,
            DEV_PARTS,
            num_parameters=11_901_408_320,
            license=DEV_LICENSE,
            source=(
                "flux-dev-kontext in src/flux/util.py of black-forest-labs/flux@57ce405: as "
                "flux-dev"
            ),
        ),
    )
    pipeline_class = "FluxKontextPipeline"
    max_controls = 1
    defaults = replace(
        Flux1Dev.defaults,
        sampling_guidance=2.5,
        sources={**Flux1Dev.defaults.sources, "sampling_guidance": "the model's card"},
    )

    def sampling_arguments(
        self, pipeline: Any, prompt: str, bucket: Bucket, controls: Sequence["Image.Image"]
    ) -> dict[str, Any]:
        from PIL import Image, ImageOps

        self.check_num_controls(len(controls), "the prompt")
        size = (bucket.width_px, bucket.height_px)
        return {
            **super().sampling_arguments(pipeline, prompt, bucket, controls),
            "image": ImageOps.fit(controls[0], size, Image.Resampling.LANCZOS),
            # The pipeline would make a megapixel of both.
            "max_area": bucket.width_px * bucket.height_px,
            "_auto_resize": False,
        }
