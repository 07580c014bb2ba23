"""Where the models that decode previews are before and after, and what memory an autoencoder
holds meanwhile.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.data import encode
from autotune.families.registry import FAMILIES
from autotune.runtime.memory import resident_bytes
from autotune.schema.workload import Bucket
from autotune.training.preview import Preview, PreviewSampler
from autotune.trials.fork_server import fork_server_context

BUCKET = Bucket(width_px=64, height_px=64, num_frames=1, num_items=1)


class Part:
    """Tells where it was moved to."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def to(self, place: object) -> None:
        self.places.append(str(place))


def _make_sampler(residency: str = "release") -> tuple[PreviewSampler, Mapping[str, Part]]:
    """A sampler around models that only tell where they are."""
    family = FAMILIES["ltx-2.3"]
    parts = {name: Part() for name in family.decoders}
    known: dict[str, Any] = {
        "model": SimpleNamespace(family=family),
        "dtype": None,
        "device": "card",
    }
    encoders: Any = SimpleNamespace(
        **known, vae_device="card", caching=SimpleNamespace(residency=residency)
    )
    sampler = PreviewSampler(encoders)
    sampler.pipeline = SimpleNamespace(**parts)
    return sampler, parts


@pytest.mark.parametrize(("residency", "after"), [("release", "cpu"), ("keep", "card")])
def test_of_what_decodes_previews_only_a_vae_that_encodes_stays_on_the_device(
    residency: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stays there beside a step is predicted: the encoders and the VAE."""
    sampler, parts = _make_sampler(residency)
    monkeypatch.setattr(sampler, "_modulation", lambda preview: contextlib.nullcontext())
    monkeypatch.setattr(sampler, "_run_encoded", lambda preview: [])
    sampler.sample(Preview("a fox", BUCKET, 2, 0))
    assert {name: part.places for name, part in parts.items()} == {
        name: ["card", after if name == "vae" else "cpu"] for name in parts
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told when to map a buffer")
@pytest.mark.parametrize("work", ["_sample_through", "_encode_through"])
def test_what_an_autoencoder_has_freed_counts_no_more(work: str) -> None:
    """Small tensors held the pages of large ones that were freed."""
    read, write = fork_server_context().Pipe(duplex=False)  # a process whose heap has no room yet
    process = fork_server_context().Process(target=_tell_growth, args=(work, write))
    process.start()
    write.close()
    assert read.recv() < 32 << 20, "of 128 MiB"
    process.join()


def _tell_growth(work: str, connection: Connection) -> None:
    """Send how many bytes a VAE still holds that has made and freed 128 MiB."""
    torch.ones(
        30 << 18
    )  # freed at once: from now on malloc would take no buffer of 8 MiB for a large one
    before = resident_bytes()

    def run_vae(*_: object) -> Any:
        large, small = zip(
            *((torch.ones(8 << 18), torch.ones(100 << 8)) for _ in range(16)), strict=True
        )
        del large
        connection.send(resident_bytes() - before)
        return small[0]

    globals()[work](run_vae)


def _sample_through(run_vae: Callable[..., Any]) -> None:
    sampler, _ = _make_sampler()
    vars(sampler).update(_modulation=lambda preview: contextlib.nullcontext(), _run_encoded=run_vae)
    sampler.sample(Preview("a fox", BUCKET, 2, 0))


def _encode_through(run_vae: Callable[..., Any]) -> None:
    encode.__dict__["_open_files"] = lambda entry: [torch.zeros(1)]
    pipeline = SimpleNamespace(vae=SimpleNamespace(device="cpu"))
    model = SimpleNamespace(family=SimpleNamespace(encode_pixels=run_vae))
    encoders: Any = SimpleNamespace(model=model, load_pipeline=lambda with_text: pipeline)
    entry: Any = SimpleNamespace(caption=None)
    encode._encode(encoders, entry)
