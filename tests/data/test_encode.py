"""Encoding a dataset: once, alone where something changed, and never trusting what was
interrupted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from autotune.data.batches import make_buckets
from autotune.data.cache import Cache, EncoderIdentity
from autotune.data.dataset import read_dataset
from autotune.data.encode import EncodedDataset, encode_dataset
from autotune.data.items import DatasetOptions
from autotune.data.pixels import open_pixels
from autotune.errors import AutotuneError
from autotune.models.family import Sample
from autotune.models.qwen_image import QwenImage
from tests.data.pictures import CAPTIONS, picture, write_pictures
from tests.small import write_small_pipeline

IDENTITY = EncoderIdentity(text_encoder="text 1", vae="vae 1")
Load = Callable[..., Any]
PROMPT_WIDTH = 128


class CountingFamily(QwenImage):
    """Qwen-Image, counting what it encodes and failing where told to."""

    def __init__(self) -> None:
        self.captions: list[str] = []
        self.num_images = 0
        self.fail_at_image: int | None = None
        self.controls: list[int] = []

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        self.captions.append(caption)
        return super().encode_caption(pipeline, caption)

    def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
        if self.num_images == self.fail_at_image:
            raise KeyboardInterrupt
        self.num_images += 1
        return super().encode_pixels(pipeline, pixels)


class EditFamily(CountingFamily):
    """One whose prompts see their control images."""

    max_controls = 2

    def encode_caption(
        self, pipeline: Any, caption: str, controls: Sequence[Tensor] = ()
    ) -> Sample:
        self.controls.append(len(controls))
        assert all(image.shape == (3, 1, 64, 64) for image in controls)
        return super().encode_caption(pipeline, caption)


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    write_small_pipeline("qwen-image", folder, CAPTIONS)
    return folder


@pytest.fixture(scope="module")
def pipeline(pipeline_folder):
    from diffusers import QwenImagePipeline

    return QwenImagePipeline.from_pretrained(pipeline_folder, transformer=None)


@pytest.fixture
def data(tmp_path):
    return write_pictures(tmp_path / "data", (64, 64), (80, 48), (100, 100), (96, 56))


def encode(
    data: Path,
    pipeline: Any,
    family: CountingFamily | None = None,
    *,
    load: Load | None = None,
    identity: EncoderIdentity = IDENTITY,
    control: Path | None = None,
    verify_seconds: float = 60,
    memory_bytes: int = 10**9,
    cache: Cache | None = None,
    **options: Any,
) -> EncodedDataset:
    encoders: Any = SimpleNamespace(
        model=SimpleNamespace(
            family=family or CountingFamily(), config={"joint_attention_dim": PROMPT_WIDTH}
        ),
        identity=identity,
        load_pipeline=load or (lambda with_text=True: pipeline),
        release_text=lambda: None,
    )
    cache = cache or Cache(data.parent / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.data.dataset.VERIFY_SECONDS", verify_seconds)
        patch.setattr("autotune.data.encode.MEMORY_BYTES", memory_bytes)
        dataset = read_dataset(data, DatasetOptions(control=control))
        return encode_dataset(
            encoders, dataset, make_buckets(dataset.items, 64, 16, 8192), cache, **options
        )


def test_samples_are_what_the_family_encodes(data, pipeline):
    encoded = encode(data, pipeline)
    family, buckets = QwenImage(), make_buckets(read_dataset(data).items, 64, 16, 8192)
    assert len(encoded.items) == 4
    for index, item in enumerate(encoded.items):
        bucket = buckets[encoded.bucket_indices[index]]
        sample = encoded.sample(index)
        with torch.no_grad():
            pixels = open_pixels([item.path], bucket.width_px, bucket.height_px)
            assert torch.equal(sample["latents"], family.encode_pixels(pipeline, pixels))
            expected = family.encode_caption(pipeline, item.caption)["prompt_embeds"]
        assert torch.equal(sample["prompt_embeds"], expected)
        assert not any(tensor.requires_grad for tensor in sample.values())
    assert encoded.groups == (0, 1, 0, 1)


def test_a_second_run_loads_nothing_and_gives_the_same(data, pipeline):
    first = encode(data, pipeline, caption_dropout=0.1)
    progress: list[tuple[int, int]] = []
    for memory_bytes in (0, 10**9):
        second = encode(
            data,
            pipeline,
            load=lambda with_text=True: pytest.fail("the pipeline was loaded"),
            caption_dropout=0.1,
            memory_bytes=memory_bytes,
            on_progress=lambda *done: progress.append(done),
        )
        assert bool(second.in_memory) == bool(memory_bytes)
        for index in range(4):
            for dropped in (False, True):
                one, other = (encoded.sample(index, dropped=dropped) for encoded in (first, second))
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)
    assert progress == 2 * [(number, 8) for number in range(1, 9)]


def test_an_interrupted_encoding_continues_where_it_was(data, pipeline):
    family = CountingFamily()
    family.fail_at_image = 2
    with pytest.raises(KeyboardInterrupt):
        encode(data, pipeline, family)
    family.fail_at_image = None
    encode(data, pipeline, family)
    assert (family.num_images, len(family.captions)) == (4, 3)


def test_a_damaged_entry_is_encoded_again_alone(data, pipeline):
    encode(data, pipeline)
    entry = next((data.parent / "cache").glob("latents-*"))
    whole = load_file(entry)["latents"].clone()  # of a mapped file
    entry.write_bytes(entry.read_bytes()[:-5] + b"wrong")
    family = CountingFamily()
    encode(data, pipeline, family)
    assert (family.num_images, family.captions) == (1, [])
    assert torch.equal(load_file(entry)["latents"], whole)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("latents", {"other": torch.zeros(16, 1, 8, 8)}),
        ("latents", {"latents": torch.full((16, 1, 8, 8), torch.nan)}),
        ("prompt", {"prompt_embeds": torch.zeros(5, PROMPT_WIDTH + 1)}),
    ],
)
def test_an_entry_that_holds_something_else_under_a_right_digest_is_encoded_again(
    data, pipeline, kind, content
):
    first = encode(data, pipeline)
    key = next((data.parent / "cache").glob(f"{kind}-*")).stem
    first.cache.write(key, content)
    family = CountingFamily()
    again = encode(data, pipeline, family)
    assert (family.num_images, len(family.captions)) == ((1, 0) if kind == "latents" else (0, 1))
    for index in range(len(first.items)):
        for name, tensor in first.sample(index).items():
            assert torch.equal(tensor, again.sample(index)[name])


def test_an_image_that_fails_while_encoding_is_left_out_and_named(data, pipeline):
    path = data / "002.png"
    path.write_bytes(path.read_bytes()[:2000])
    progress: list[tuple[int, int]] = []
    encoded = encode(
        data, pipeline, verify_seconds=0, on_progress=lambda *done: progress.append(done)
    )
    assert [item.path.name for item in encoded.items] == ["000.png", "001.png", "003.png"]
    assert [(problem.file, problem.kind) for problem in encoded.problems] == [("002.png", "broken")]
    assert encoded.groups == (0, 1, 1)
    assert progress[-1] == (7, 7)
    assert encoded.sample(2)["latents"].shape == encoded.sample(1)["latents"].shape


def test_control_images_become_latents_and_part_of_the_prompt(tmp_path, pipeline):
    data = write_pictures(tmp_path / "data", (64, 64), (64, 64))
    control = tmp_path / "control"
    control.mkdir()
    for seed, name in enumerate(("000.png", "001_1.png", "001_2.png"), start=40):
        picture(seed, 90, 80).save(control / name)
    family = EditFamily()
    encoded = encode(data, pipeline, family, control=control, caption_dropout=0.1)
    assert sorted(family.controls) == [1, 1, 2, 2]
    assert sorted(encoded.sample(1)) == [
        "control_latents_1",
        "control_latents_2",
        "latents",
        "prompt_embeds",
    ]
    assert len(set(encoded.groups)) == 2
    picture(99, 90, 80).save(control / "000.png")
    family = EditFamily()
    encode(data, pipeline, family, control=control, caption_dropout=0.1)
    assert (family.controls, family.num_images) == ([1, 1], 1)


def test_an_image_that_changes_while_others_are_encoded_is_not_cached_under_its_old_key(
    data, pipeline
):
    class Meanwhile(CountingFamily):
        def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
            picture(99).save(data / "003.png")
            return super().encode_pixels(pipeline, pixels)

    before = (data / "003.png").read_bytes()
    with pytest.raises(AutotuneError, match=r"003\.png changed while") as caught:
        encode(data, pipeline, Meanwhile())
    assert "run again" in caught.value.hint
    (data / "003.png").write_bytes(before)
    family = CountingFamily()
    encoded = encode(data, pipeline, family)
    assert (len(encoded.items), family.num_images, family.captions) == (4, 1, [])


def test_numbers_that_are_not_finite_are_never_cached(data, pipeline):
    class Damaged(CountingFamily):
        def encode_pixels(self, pipeline: Any, pixels: Tensor) -> Tensor:
            return super().encode_pixels(pipeline, pixels) * float("nan")

    with pytest.raises(
        AutotuneError, match=r"pixels of .*000\.png into numbers that are not finite"
    ):
        encode(data, pipeline, Damaged())
    assert not list((data.parent / "cache").glob("latents-*"))
