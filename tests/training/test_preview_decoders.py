"""Where the models that decode previews are before and after."""

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.families.registry import FAMILIES
from autotune.schema.workload import Bucket
from autotune.training.preview import Preview, PreviewSampler

BUCKET = Bucket(width_px=64, height_px=64, num_frames=1, num_items=1)


class Part:
    """Tells where it was moved to."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def to(self, place: object) -> None:
        self.places.append(str(place))


@pytest.mark.parametrize(("residency", "after"), [("release", "cpu"), ("keep", "card")])
def test_of_what_decodes_previews_only_a_vae_that_encodes_stays_on_the_device(
    residency: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays there beside a step is predicted: the encoders and the VAE."""
    family = FAMILIES["ltx-2.3"]
    parts: Mapping[str, Any] = {name: Part() for name in family.decoders}
    known = {"model": SimpleNamespace(family=family), "dtype": None, "device": "card", "vae_device": "card"}
    encoders: Any = SimpleNamespace(**known, caching=SimpleNamespace(residency=residency))
    sampler = PreviewSampler(encoders)
    sampler.pipeline = SimpleNamespace(**parts)
    monkeypatch.setattr(sampler, "_modulation", lambda preview: contextlib.nullcontext())
    monkeypatch.setattr(sampler, "_run_encoded", lambda preview: [])
    sampler.sample(Preview("a fox", BUCKET, 2, 0))
    assert {name: part.places for name, part in parts.items()} == {
        name: ["card", after if name == "vae" else "cpu"] for name in family.decoders
    }
