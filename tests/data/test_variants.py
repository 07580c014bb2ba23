"""What one image may look like each time it is seen: other captions, mirrored, weighed by a mask
or by its folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from autotune.data.batches import BatchOrder, make_buckets
from autotune.data.cache import Cache, EncoderIdentity, MemoryCache
from autotune.data.dataset import read_dataset
from autotune.data.encode import EncodedDataset, encode_dataset
from autotune.data.items import DatasetOptions
from autotune.errors import InvalidInput
from autotune.models.family import denoising_loss
from autotune.models.noise import FLOW_MATCHING
from tests.data.pictures import CAPTIONS, picture, write_pictures

TAGS = "sks, fox, snow, red, tree"


class PlainFamily:
    """Latents are means of 8 x 8 px, and a caption is its characters: what was encoded can be
    read off."""

    def sample_shapes(
        self, config: object, bucket: Any, text_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        return {
            "latents": (3, 1, bucket.height_px // 8, bucket.width_px // 8),
            "prompt_embeds": (text_tokens, 1),
        }

    def encode_caption(self, pipeline: object, caption: str, controls: object) -> dict[str, Tensor]:
        return {"prompt_embeds": torch.tensor([[float(ord(letter))] for letter in caption])}

    def encode_pixels(self, pipeline: object, pixels: Tensor) -> Tensor:
        return nn.functional.avg_pool3d(pixels[None], (1, 8, 8))[0]


def encode(
    data: Path, options: DatasetOptions, *, cache: Cache | None = None, **more: Any
) -> EncodedDataset:
    encoders: Any = SimpleNamespace(
        model=SimpleNamespace(family=PlainFamily(), config={}),
        identity=EncoderIdentity(text_encoder="text", vae="vae"),
        load_pipeline=lambda with_text: SimpleNamespace(vae=SimpleNamespace(device="cpu")),
        release_text=lambda: None,
    )
    dataset = read_dataset(data, options)
    return encode_dataset(
        encoders,
        dataset,
        make_buckets(dataset.items, 64, 16, 512),
        cache or MemoryCache(data),
        **more,
    )


def text(sample: dict[str, Tensor]) -> str:
    return "".join(chr(int(code)) for code in sample["prompt_embeds"][:, 0])


def test_each_time_one_of_the_captions_is_drawn(tmp_path):
    for name in ("a.png", "b.png"):
        picture(ord(name[0])).save(tmp_path / name)
    lines = [
        {"file_name": "a.png", "text": ["a fox", "an animal", "a fox"]},
        {"file_name": "b.png", "text": TAGS},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    encoded = encode(tmp_path, DatasetOptions(trigger="sks", shuffle_tags=3, keep_tags=1))
    assert encoded.num_captions == (2, 3)
    order = BatchOrder((0, 0), (1, 1), 2, seed=4, num_captions=encoded.num_captions)
    draws = [draw for step in range(200) for draw in order.images(step)]
    seen = {text(encoded.sample(*draw)) for draw in draws}
    assert {"sks, a fox", "sks, an animal", TAGS} < seen
    assert len(seen) == 5
    assert sum(draw.caption == 0 for draw in draws if draw.item == 0) == pytest.approx(100, abs=25)


def test_images_are_mirrored_half_of_the_time_and_the_rest_of_the_order_stays(tmp_path):
    write_pictures(tmp_path, (64, 64))
    encoded = encode(tmp_path, DatasetOptions(flip=True), flip=True)
    plain, flipped = encoded.sample(0), encoded.sample(0, flipped=True)
    assert torch.allclose(flipped["latents"], plain["latents"].flip(-1))
    orders = [
        BatchOrder((0,) * 9, (1,) * 9, 4, seed=1, caption_dropout=0.3, flip=flip)
        for flip in (False, True)
    ]
    without, with_flips = (
        [draw for step in range(100) for draw in order.images(step)] for order in orders
    )
    assert [draw[:3] for draw in without] == [draw[:3] for draw in with_flips]
    assert sum(draw.flipped for draw in with_flips) == pytest.approx(200, abs=40)


@pytest.mark.parametrize("kind", ["files", "alpha"])
def test_a_mask_weighs_the_loss_where_it_lies(tmp_path, kind):
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 16, 64))  # the left quarter
    image = picture(1)
    if kind == "alpha":
        image.putalpha(mask)
    else:
        mask.save(tmp_path / "a.mask.png")
    image.save(tmp_path / "a.png")
    picture(2).save(tmp_path / "b.png")
    options = DatasetOptions(caption="x", loss_mask=kind, flip=True)
    encoded = encode(tmp_path, options, cache=Cache(tmp_path / "cache"), flip=True, mask_floor=0.25)
    masked, flipped, whole = encoded.sample(0), encoded.sample(0, flipped=True), encoded.sample(1)
    row = torch.tensor([1.0] * 2 + [0.25] * 6)
    assert torch.equal(masked["loss_weights"], row.expand(1, 1, 8, 8))
    assert torch.equal(flipped["loss_weights"], row.flip(0).expand(1, 1, 8, 8))
    assert torch.equal(whole["loss_weights"], torch.ones(1, 1, 8, 8))
    assert encode(tmp_path, options, flip=True).entries[0].keys == encoded.entries[0].keys
    mask.point(lambda value: 255 - value).save(tmp_path / "a.mask.png")
    again = encode(tmp_path, options, flip=True)
    assert (again.entries[0].keys != encoded.entries[0].keys) == (kind == "files")


def test_the_loss_counts_what_its_weights_say():
    noise, clean = torch.ones(2, 1, 1, 2, 2), torch.zeros(2, 1, 1, 2, 2)
    family: Any = SimpleNamespace(
        noise=FLOW_MATCHING, predict=lambda *_: torch.zeros(2, 1, 1, 2, 2)
    )
    weights = torch.tensor([[[[[1.0, 0.0], [0.0, 0.0]]]], [[[[2.0, 2.0], [2.0, 2.0]]]]])
    args = (torch.tensor([0.5, 0.5]), FLOW_MATCHING)
    whole = denoising_loss(family, nn.Identity(), {"latents": clean}, noise, *args)
    for weighting in ("none", "sigma_sqrt"):
        plain = denoising_loss(family, nn.Identity(), {"latents": clean}, noise, *args, weighting)  # type: ignore[arg-type]
        weighed = denoising_loss(
            family,
            nn.Identity(),
            {"latents": clean, "loss_weights": weights},
            noise,
            *args,
            weighting,  # type: ignore[arg-type]
        )
        assert float(weighed / plain) == pytest.approx((1 / 4 + 2) / 2)
    assert float(whole) == 1


def test_a_file_lists_folders_with_repeats_weights_and_captions_of_their_own(tmp_path):
    write_pictures(tmp_path / "dogs", (64, 64))
    write_pictures(tmp_path / "class", (64, 64), first=1)
    (tmp_path / "data.yaml").write_text(
        "folders:\n- path: dogs\n  repeats: 3\n- path: class\n  weight: 0.5\n  regularization: "
        "true\n"
    )
    options = DatasetOptions(trigger="sks")
    dataset = read_dataset(tmp_path / "data.yaml", options)
    assert [(item.caption, item.repeats, item.weight) for item in dataset.items] == [
        (f"sks, {CAPTIONS[0]}", 3, 1.0), (CAPTIONS[1], 1, 0.5),
    ]  # fmt: skip
    encoded = encode(tmp_path / "data.yaml", options)
    assert [float(encoded.sample(index)["loss_weights"].mean()) for index in (0, 1)] == [1.0, 0.5]


def test_a_folder_inside_another_would_be_trained_twice(tmp_path):
    outer, inner = tmp_path / "dogs", tmp_path / "dogs" / "portraits"
    write_pictures(outer, (64, 64))
    write_pictures(inner, (64, 64), first=1)
    (tmp_path / "data.yaml").write_text(
        "folders:\n- path: dogs/portraits\n  repeats: 3\n- path: dogs\n"
    )
    for data in ([outer, inner], [inner, outer / ".." / "dogs"], tmp_path / "data.yaml"):
        with pytest.raises(
            InvalidInput, match=r"portraits lies in .*dogs, so its images would be trained twice"
        ):
            read_dataset(data)
    write_pictures(tmp_path / "dogs2", (64, 64))
    assert len(read_dataset([inner, tmp_path / "dogs2"]).items) == 2
