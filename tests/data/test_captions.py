"""Captions that models of this machine write, and that words change."""

import pytest
import torch
import transformers
from PIL import Image

from autotune.data.captions import reworded, undo_edit
from autotune.data.describe import Describer
from autotune.errors import InvalidInput, NothingFits
from autotune.system.memory import measure_peak_memory
from autotune.training import caption_data
from tests.small import write_small_pipeline


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    monkeypatch.setattr("autotune.data.describe.MAX_TEXT_TOKENS", 16)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, side in (("a", 64), ("b", 96), ("c", 128)):
        Image.new("RGB", (side, 64), "teal").save(folder / f"{name}.png")
    (folder / "a.txt").write_text("a dog on grass")
    return folder


def captions(folder):
    return {file.stem: file.read_text().strip() for file in sorted(folder.glob("*.txt"))}


def test_words_change_and_are_taken_back(photos):
    before = captions(photos)
    words = {"trigger": "sks", "prefix": "photo of", "replacements": {"dog": "cat"}}
    shown = caption_data(photos, **words, dry_run=True)
    assert captions(photos) == before
    assert caption_data(photos, **words) == shown
    assert captions(photos)["a"] == "sks, photo of a cat on grass"
    assert reworded("she asks", trigger="sks") == "sks, she asks"  # as training reads it
    assert caption_data(photos, **words) == {}
    assert caption_data(photos, caption="for none of them") == {}
    caption_data(photos / "b.png", caption="another", overwrite=True)
    assert captions(photos)["b"] == "another"
    undo_edit(photos)
    undo_edit(photos)
    assert captions(photos) == before
    caption_data(photos, caption="a puppy", replacements={"dog": "cat", "puppy": "kitten"})
    assert captions(photos) == {"a": "a cat on grass", "b": "a kitten", "c": "a kitten"}
    with pytest.raises(InvalidInput):
        caption_data(photos)


def test_edits_lose_no_byte_of_captions(photos):
    whole = {"a.txt": b"\xef\xbb\xbfa dog\r\non grass", "b.txt": "a dog".encode("utf-16")}
    whole |= {"c.txt": b"a caf\xe9", "d.txt": b"dog " * 300_000, "words": b"a dog", "e.txt": b""}
    for name, content in whole.items():
        (photos / name).write_bytes(content)
        Image.new("RGB", (64, 64), "red").save((photos / name).with_suffix(".png"))
    (photos / "words.txt").symlink_to("words")
    (photos / "a.txt").chmod(0o640)
    told = []
    changed = caption_data(photos, trigger="sks", on_event=told.append)
    assert sorted(changed) == ["a.png", "b.png", "e.png", "words.png"]
    assert all(name in told[0].text for name in ("c.txt is not UTF-8", "d.txt cannot be read"))
    assert (photos / "a.txt").read_bytes() == b"\xef\xbb\xbfsks, a dog\r\non grass\r\n"
    assert (photos / "words").read_text() == "sks, a dog\n"
    undo_edit(photos)
    assert {name: (photos / name).read_bytes() for name in whole} == whole
    assert (photos / "words.txt").is_symlink()
    assert (photos / "a.txt").stat().st_mode & 0o777 == 0o640


def small_blip(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[DEC]", "[ENC]", "a", "dog", "cat"]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    pictures = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    width = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**width, "vocab_size": len(words), "intermediate_size": 64, "encoder_hidden_size": 32}
    text |= {"bos_token_id": 4, "eos_token_id": 3, "pad_token_id": 0, "sep_token_id": 3}
    vision = {**width, "intermediate_size": 64, "image_size": 32, "patch_size": 16}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    transformers.BlipProcessor(pictures, tokenizer).save_pretrained(folder)
    return str(folder)


def model_of(kind, folder):
    folder.mkdir()
    if kind == "blip":
        return small_blip(folder)
    write_small_pipeline(kind, folder, ["a dog on grass"])
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen-image", "qwen-image-2.1", "blip"])
def test_models_describe_what_has_no_caption(photos, tmp_path, monkeypatch, kind):
    asked = []
    model = model_of(kind, tmp_path / "model")
    found = Describer.find(model)
    describe = found.load(torch.device("cpu"))
    picture = Image.new("RGB", (640, 480), "teal")
    told = describe(picture, "What is it?")
    assert describe(picture, "What is it?") == told
    assert told.isprintable()

    def stop_at_second(picture, prompt):
        asked.append(picture)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return f"picture {len(asked)}"

    monkeypatch.setattr(Describer, "load", lambda self, device: stop_at_second)
    told_events = []
    assert caption_data(photos, model=model, dry_run=True) == {"b.png": "", "c.png": ""}
    with pytest.raises(KeyboardInterrupt):
        caption_data(photos, model=model, on_event=told_events.append)
    assert "GiB" in str(told_events[0])
    words = {"model": model, "replacements": {"picture": "photo"}}
    assert caption_data(photos, **words, dry_run=True) == {"b.png": "photo 1", "c.png": ""}
    caption_data(photos, **words)
    assert captions(photos) == {"a": "a dog on grass", "b": "photo 1", "c": "photo 3"}
    undo_edit(photos)
    undo_edit(photos)
    assert captions(photos) == {"a": "a dog on grass"}
    monkeypatch.setattr("autotune.data.describe.available_bytes", lambda: 1000)
    with pytest.raises(NothingFits):
        caption_data(photos, model=model)
    assert len(asked) == 3


def test_work_of_a_picture_is_foreseen(tmp_path, monkeypatch):
    monkeypatch.setattr("autotune.data.describe.MAX_AREA_PX", 640 * 480)
    found = Describer.find(model_of("qwen-image-edit", tmp_path / "model"))
    picture, cpu = Image.new("RGB", (640, 480), "teal"), torch.device("cpu")
    describe = found.load(cpu)
    _, peak = measure_peak_memory(cpu, lambda: (), lambda: describe(picture, "What is it?"))
    assert 0.5 < peak / found.work_bytes < 1.5


def test_nothing_is_fetched_for_captions(photos):
    with pytest.raises(InvalidInput, match="nothing is downloaded"):
        caption_data(photos, model="qwen-image")
    with pytest.raises(InvalidInput, match="describes no pictures"):
        caption_data(photos, model=model_of("sdxl", photos.parent / "small"))
