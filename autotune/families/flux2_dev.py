"""FLUX.2 [dev]: the architecture of FLUX.2 [klein] with Mistral Small as its text encoder, and
guidance as an input.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.families.base import Parts, PublishedModel, load_tokenizer
from autotune.families.flux2_klein import Flux2Klein


class Flux2Dev(Flux2Klein):
    """Text to image."""

    name = "flux2-dev"
    models = (
        PublishedModel(
            "black-forest-labs/FLUX.2-dev",
            {},
            Parts((24_011_361_280,), "AutoencoderKLFlux2"),
            num_parameters=32_223_281_152,
            license="flux-dev-non-commercial-license",
            source=(
                "Flux2Params in src/flux2/model.py of black-forest-labs/flux2@ab7cca6, as "
                "built "
                "there"
            ),
        ),
    )
    pipeline_class = "Flux2Pipeline"
    defaults = replace(
        Flux2Klein.defaults,
        training_guidance=1.0,
        preview_calls=1,
        sources={
            "sampling_guidance": "the pipeline's default",
            "training_guidance": "musubi-tuner",
        },
    )

    def load_pipeline(self, folder: Path, **components: Any) -> Any:
        # A tokenizer has the chat template that is all the pipeline wants of Pixtral's processor,
        # and no torchvision.
        return super().load_pipeline(folder, **{"tokenizer": load_tokenizer(folder), **components})
