"""Data is encoded once, alone where something changed; what was interrupted is not trusted."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from autotune.data.batches import BatchOrder, make_buckets
from autotune.data.cache import Cache, EncoderIdentity, MemoryCache
from autotune.data.dataset import read_dataset
from autotune.data.encode import encode_dataset
from autotune.data.items import DatasetOptions
from autotune.data.pixels import open_pixels
from autotune.errors import AutotuneError, InvalidInput
from autotune.models.family import denoising_loss
from autotune.models.noise import FLOW_MATCHING
from tests.data.pictures import CAPTIONS, picture, write_pictures

TAGS = "sks, fox, snow, red, tree"


class PlainFamily:
    def __init__(self, fail_at_image=None):
        self.captions, self.controls = [], []
        self.num_images, self.fail_at_image = 0, fail_at_image

    def sample_shapes(self, config, bucket, text_tokens, num_controls=0):
        size = (bucket.height_px // 8, bucket.width_px // 8)
        return {"latents": (3, 1, *size), "prompt_embeds": (text_tokens, 1)}

    def encode_caption(self, pipeline, caption, controls=()):
        self.captions.append(caption)
        self.controls.append(len(controls))
        assert all(image.shape == (3, 1, 64, 64) for image in controls)
        return {"prompt_embeds": torch.tensor([[float(ord(letter))] for letter in caption or "-"])}

    def encode_item(self, pipeline, pixels):
        return {"latents": self.encode_pixels(pipeline, pixels)}

    def encode_pixels(self, pipeline, pixels):
        if self.num_images == self.fail_at_image:
            raise KeyboardInterrupt
        self.num_images += 1
        return nn.functional.avg_pool3d(pixels[None], (1, 8, 8))[0]


@pytest.fixture
def data(tmp_path):
    return write_pictures(tmp_path / "data", (64, 64), (80, 48), (100, 100), (96, 56))


def load(with_text=True):
    return SimpleNamespace(vae=SimpleNamespace(device="cpu"))


def encode(data, family=None, options=None, *, load=load, cache=None, **more):
    encoders = SimpleNamespace(
        model=SimpleNamespace(family=family or PlainFamily(), config={}),
        identity=EncoderIdentity(text_encoder="text", vae="vae"),
        load_pipeline=load,
        release_text=lambda: None,
    )
    dataset = read_dataset(data, options or DatasetOptions())
    buckets = make_buckets(dataset.items, 64, 16, 8192)
    return encode_dataset(encoders, dataset, buckets, cache or Cache(data.parent / "cache"), **more)


def text(sample):
    return "".join(chr(int(code)) for code in sample["prompt_embeds"][:, 0])


def test_samples_are_what_the_family_encodes(data):
    encoded = encode(data)
    buckets = make_buckets(read_dataset(data).items, 64, 16, 8192)
    assert len(encoded.items) == 4
    for index, item in enumerate(encoded.items):
        bucket, sample = buckets[encoded.bucket_indices[index]], encoded.sample(index)
        pixels = open_pixels([item.path], bucket.width_px, bucket.height_px)
        assert torch.equal(sample["latents"], PlainFamily().encode_pixels(None, pixels))
        assert text(sample) == item.caption
        assert not any(tensor.requires_grad for tensor in sample.values())
    assert encoded.groups == (0, 1, 0, 1)


def test_second_run_encodes_nothing(data, monkeypatch):
    def refuse(with_text=True):
        pytest.fail("the pipeline was loaded")

    first, progress = encode(data, caption_dropout=0.1), []
    for memory_bytes in (0, 10**9):
        monkeypatch.setattr("autotune.data.cache.MEMORY_BYTES", memory_bytes)
        told = {"on_progress": lambda *done: progress.append(done)}
        second = encode(data, load=refuse, caption_dropout=0.1, **told)
        assert bool(second.in_memory) == bool(memory_bytes)
        for index, dropped in ((0, False), (1, True), (2, False), (3, True)):
            one, other = (encoded.sample(index, dropped=dropped) for encoded in (first, second))
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
    assert progress == 2 * [(number, 8) for number in range(1, 9)]
    assert first.item_seconds > 0 == second.item_seconds


def test_interrupted_encoding_continues_where_it_was(data):
    family = PlainFamily(fail_at_image=2)
    with pytest.raises(KeyboardInterrupt):
        encode(data, family)
    family.fail_at_image = None
    encode(data, family)
    assert (family.num_images, len(family.captions)) == (4, 3)


def test_damaged_entry_is_encoded_again_alone(data):
    encode(data)
    entry = next((data.parent / "cache").glob("latents-*"))
    whole = load_file(entry)["latents"].clone()  # of a mapped file
    entry.write_bytes(entry.read_bytes()[:-5] + b"wrong")
    family = PlainFamily()
    encode(data, family)
    assert (family.num_images, family.captions) == (1, [])
    assert torch.equal(load_file(entry)["latents"], whole)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("latents", {"other": torch.zeros(3, 1, 8, 8)}),
        ("latents", {"latents": torch.full((3, 1, 8, 8), torch.nan)}),
        ("prompt", {"prompt_embeds": torch.zeros(5, 2)}),
    ],
)
def test_foreign_entries_are_encoded_again(data, kind, content):
    first = encode(data)
    key = next((data.parent / "cache").glob(f"{kind}-*")).stem
    first.cache.write(key, content)
    family = PlainFamily()
    again = encode(data, family)
    assert (family.num_images, len(family.captions)) == ((1, 0) if kind == "latents" else (0, 1))
    for index in range(len(first.items)):
        for name, tensor in first.sample(index).items():
            assert torch.equal(tensor, again.sample(index)[name])


def test_failing_images_are_left_out(data, monkeypatch):
    monkeypatch.setattr("autotune.data.dataset.VERIFY_SECONDS", 0)
    path, progress = data / "002.png", []
    path.write_bytes(path.read_bytes()[:2000])
    encoded = encode(data, on_progress=lambda *done: progress.append(done))
    assert [item.path.name for item in encoded.items] == ["000.png", "001.png", "003.png"]
    assert [(problem.file, problem.kind) for problem in encoded.problems] == [("002.png", "broken")]
    assert encoded.groups == (0, 1, 1)
    assert progress[-1] == (7, 7)


def test_control_images_become_latents(tmp_path):
    data = write_pictures(tmp_path / "data", (64, 64), (64, 64))
    control = tmp_path / "control"
    control.mkdir()
    for seed, name in enumerate(("000.png", "001_1.png", "001_2.png"), start=40):
        picture(seed, 90, 80).save(control / name)
    family, options = PlainFamily(), DatasetOptions(control=control)
    encoded = encode(data, family, options, caption_dropout=0.1)
    assert sorted(family.controls) == [1, 1, 2, 2]
    names = ["control_latents_1", "control_latents_2", "latents", "prompt_embeds"]
    assert sorted(encoded.sample(1)) == names
    assert len(set(encoded.groups)) == 2
    picture(99, 90, 80).save(control / "000.png")
    family = PlainFamily()
    encode(data, family, options, caption_dropout=0.1)
    assert (family.controls, family.num_images) == ([1, 1], 1)


def test_changed_images_are_not_cached(data):
    class Meanwhile(PlainFamily):
        def encode_pixels(self, pipeline, pixels):
            picture(99).save(data / "003.png")
            return super().encode_pixels(pipeline, pixels)

    before = (data / "003.png").read_bytes()
    with pytest.raises(AutotuneError, match=r"003\.png changed while") as caught:
        encode(data, Meanwhile())
    assert "run again" in caught.value.hint
    (data / "003.png").write_bytes(before)
    family = PlainFamily()
    encoded = encode(data, family)
    assert (len(encoded.items), family.num_images, family.captions) == (4, 1, [])


def test_infinite_numbers_are_never_cached(data):
    class Damaged(PlainFamily):
        def encode_pixels(self, pipeline, pixels):
            return super().encode_pixels(pipeline, pixels) * float("nan")

    with pytest.raises(AutotuneError, match=r"pixels of .*000\.png into numbers that are not"):
        encode(data, Damaged())
    assert not list((data.parent / "cache").glob("latents-*"))


def test_captions_are_drawn_each_time(tmp_path):
    for name in ("a.png", "b.png"):
        picture(ord(name[0])).save(tmp_path / name)
    lines = [
        {"file_name": "a.png", "text": ["a fox", "an animal", "a fox"]},
        {"file_name": "b.png", "text": TAGS},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    encoded = encode(tmp_path, options=DatasetOptions(trigger="sks", shuffle_tags=3, keep_tags=1))
    assert encoded.num_captions == (2, 3)
    order = BatchOrder((0, 0), (1, 1), 2, seed=4, num_captions=encoded.num_captions)
    draws = [draw for step in range(200) for draw in order.images(step)]
    seen = {text(encoded.sample(*draw)) for draw in draws}
    assert {"sks, a fox", "sks, an animal", TAGS} < seen
    assert len(seen) == 5
    assert sum(draw.caption == 0 for draw in draws if draw.item == 0) == pytest.approx(100, abs=25)


def test_half_of_the_images_are_mirrored(tmp_path):
    write_pictures(tmp_path, (64, 64))
    encoded = encode(tmp_path, options=DatasetOptions(flip=True), flip=True)
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
def test_mask_weighs_loss_where_it_lies(tmp_path, kind):
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
    encoded = encode(tmp_path, options=options, flip=True, mask_floor=0.25)
    masked, flipped, whole = encoded.sample(0), encoded.sample(0, flipped=True), encoded.sample(1)
    row = torch.tensor([1.0] * 2 + [0.25] * 6)
    assert torch.equal(masked["loss_weights"], row.expand(1, 1, 8, 8))
    assert torch.equal(flipped["loss_weights"], row.flip(0).expand(1, 1, 8, 8))
    assert torch.equal(whole["loss_weights"], torch.ones(1, 1, 8, 8))
    mask.point(lambda value: 255 - value).save(tmp_path / "a.mask.png")
    again = encode(tmp_path, options=options, cache=MemoryCache(tmp_path), flip=True)
    assert (again.entries[0].keys != encoded.entries[0].keys) == (kind == "files")


def test_loss_counts_what_its_weights_say():
    noise, clean = torch.ones(2, 1, 1, 2, 2), torch.zeros(2, 1, 1, 2, 2)
    family = SimpleNamespace(noise=FLOW_MATCHING, predict=lambda *_: torch.zeros(2, 1, 1, 2, 2))
    weights = torch.tensor([[[[[1.0, 0.0], [0.0, 0.0]]]], [[[[2.0, 2.0], [2.0, 2.0]]]]])
    args = (torch.tensor([0.5, 0.5]), FLOW_MATCHING)
    whole = denoising_loss(family, nn.Identity(), {"latents": clean}, noise, *args)
    for weighting in ("none", "sigma_sqrt"):
        plain = denoising_loss(family, nn.Identity(), {"latents": clean}, noise, *args, weighting)
        batch = {"latents": clean, "loss_weights": weights}
        weighed = denoising_loss(family, nn.Identity(), batch, noise, *args, weighting)
        assert float(weighed / plain) == pytest.approx((1 / 4 + 2) / 2)
    assert float(whole) == 1


def test_listed_folders_have_their_own_settings(tmp_path):
    write_pictures(tmp_path / "dogs", (64, 64))
    write_pictures(tmp_path / "class", (64, 64), first=1)
    folders = ["{path: dogs, repeats: 3}", "{path: class, weight: 0.5, regularization: true}"]
    (tmp_path / "data.yaml").write_text(f"folders: [{', '.join(folders)}]")
    options = DatasetOptions(trigger="sks")
    dataset = read_dataset(tmp_path / "data.yaml", options)
    found = [(item.caption, item.repeats, item.weight) for item in dataset.items]
    assert found == [(f"sks, {CAPTIONS[0]}", 3, 1.0), (CAPTIONS[1], 1, 0.5)]
    encoded = encode(tmp_path / "data.yaml", options=options)
    assert [float(encoded.sample(index)["loss_weights"].mean()) for index in (0, 1)] == [1.0, 0.5]


def test_nested_folders_are_refused(tmp_path):
    outer, inner = tmp_path / "dogs", tmp_path / "dogs" / "portraits"
    write_pictures(outer, (64, 64))
    write_pictures(inner, (64, 64), first=1)
    (tmp_path / "data.yaml").write_text("folders: [{path: dogs/portraits}, {path: dogs}]")
    for data in ([outer, inner], [inner, outer / ".." / "dogs"], tmp_path / "data.yaml"):
        with pytest.raises(InvalidInput, match=r"portraits lies in .*dogs"):
            read_dataset(data)
    write_pictures(tmp_path / "dogs2", (64, 64))
    assert len(read_dataset([inner, tmp_path / "dogs2"]).items) == 2


TENSORS = {
    "latents": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_entries_come_back_exactly(tmp_path):
    cache = Cache(tmp_path / "new" / "cache")
    assert cache.read("a") is None
    cache.write("a", {**TENSORS, "view": TENSORS["latents"].permute(2, 0, 1)})
    read = cache.read("a")
    assert torch.equal(read.pop("view"), TENSORS["latents"].permute(2, 0, 1))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype
    assert names(cache.folder) == ["a.safetensors"]


def test_renamed_entries_are_not_taken(tmp_path):
    cache = Cache(tmp_path)
    cache.write("a", TENSORS)
    (tmp_path / "a.safetensors").rename(tmp_path / "b.safetensors")
    assert cache.read("b") is None
    assert names(tmp_path) == []


@given(data=st.data())
@settings(max_examples=150)
def test_damaged_entries_are_removed(data, tmp_path_factory):
    cache = Cache(tmp_path_factory.mktemp("damaged"))
    cache.write("a", TENSORS)
    path = cache.folder / "a.safetensors"
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans(), label="truncate"):
        path.write_bytes(whole[:position])
    else:
        content = bytearray(whole)
        content[position] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    read = cache.read("a")
    if read is None:
        assert not path.exists()
    else:  # padding of the header
        assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_pickled_files_are_never_looked_at(tmp_path):
    torch.save(TENSORS, tmp_path / "a.pt")
    torch.save(TENSORS, tmp_path / "a.safetensors")
    assert Cache(tmp_path).read("a") is None
    assert names(tmp_path) == ["a.pt"]


def test_eviction_spares_what_is_needed(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    sizes = [cache.write(key, TENSORS) for key in ("a", "b", "c", "d")]
    for age, key in enumerate(("d", "c", "b", "a")):
        os.utime(tmp_path / f"{key}.safetensors", (time.time() - 100 * (age + 1),) * 2)
    assert cache.read("a") is not None  # which makes it the one used last
    monkeypatch.setattr("autotune.data.cache.SIZE_LIMIT_BYTES", 2 * sizes[0])
    assert cache.evict(keep={"b"}) == 2
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    monkeypatch.setattr("autotune.data.cache.SIZE_LIMIT_BYTES", 0)
    assert cache.evict(keep={"a", "b"}) == 0


def test_full_disks_leave_nothing_half_written(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    cache = Cache(tmp_path)
    cache.write("a", TENSORS)
    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(AutotuneError, match="is full"):
        cache.write("b", TENSORS)
    assert names(tmp_path) == ["a.safetensors"]
