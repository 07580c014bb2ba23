"""Videos become clips at the model's rate, decoded one frame at a time, and what is wrong with
one is named."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from autotune.data.dataset import read_dataset, scan_dataset
from autotune.data.items import DatasetOptions
from autotune.data.pixels import ClipSpan, choose_spans, open_pixels, read_clip, read_facts
from tests.data.pictures import STEP, picture, write_video

FIVE = DatasetOptions(num_frames=5, caption="x", frames_per_second=16)


def shown(path: Path, span: ClipSpan) -> list[float]:
    """Numbers of the frames that a clip shows, by their brightness."""
    return [
        image.convert("L").resize((1, 1)).getpixel((0, 0)) / STEP for image in read_clip(path, span)
    ]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")]
)
def test_every_format_is_resampled_to_the_rate_of_the_model(tmp_path, name, codec):
    path = write_video(tmp_path / name, 30, fps=24, codec=codec)
    (item,) = read_dataset(tmp_path, FIVE).items
    assert item.span is not None
    assert shown(path, item.span) == pytest.approx(
        [0, 2, 3, 5, 6], abs=1.1
    )  # each for the middle of its time
    later = ClipSpan(item.span.start_seconds + 0.5, 5, 16)
    assert shown(path, later) == pytest.approx([12, 14, 15, 17, 18], abs=1.1)


@pytest.mark.parametrize("name", ["a.gif", "a.webp"])
def test_animations_are_clips_and_still_webp_images_are_not(tmp_path, name):
    frames = [Image.new("RGB", (64, 48), (STEP * number,) * 3) for number in range(12)]
    options = {"lossless": True} if name.endswith("webp") else {}
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=50, **options)
    picture(1).save(tmp_path / "still.webp")
    clip, still = read_dataset(tmp_path, FIVE).items
    assert (clip.num_frames, still.num_frames, still.span) == (5, 1, None)
    assert clip.span is not None
    assert shown(clip.path, clip.span) == [0, 1, 3, 4, 5]


def test_clips_are_the_head_or_all_or_evenly_spread(tmp_path):
    facts = read_facts(write_video(tmp_path / "a.mp4", 48, fps=24))
    starts = {
        choice: [round(span.start_seconds * 16) for span in choose_spans(facts, choice, (9, 5), 16)]
        for choice in ("head", "all", 1, 3)
    }
    assert starts == {"head": [0], "all": [0, 9, 18], 1: [11], 3: [0, 11, 23]}


def test_what_is_wrong_with_a_video_is_named(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", 20).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.webm").write_bytes(b"")
    (tmp_path / "list.mp4").write_text(
        f"#EXTM3U\n#EXTINF:10,\nfile://{tmp_path}/whole.mp4\n#EXT-X-ENDLIST\n"
    )
    write_video(tmp_path / "rough.mkv", 9, times_ms=[0, 40, 80, 120, 400, 440, 480, 900, 940])
    write_video(tmp_path / "thin.mp4", 20, size=(64, 16))
    dataset = scan_dataset(tmp_path, FIVE)
    assert {problem.file: problem.kind for problem in dataset.problems} == {
        "cut.mp4": "broken", "empty.webm": "broken", "list.mp4": "broken", "rough.mkv": "variable",
        "thin.mp4": "tiny",
    }  # fmt: skip
    assert [item.path.name for item in dataset.items] == ["rough.mkv", "whole.mp4"]
    assert "1 variable" not in " ".join(dataset.problem_summary)  # it is not left out


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_video_crashes_the_reader(tmp_path, data):
    source = tmp_path / "whole.mkv"
    if not source.exists():
        write_video(source, 12)
    content = bytearray(source.read_bytes())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)))
    ):
        content[place] = value
    folder = tmp_path / "damaged"
    folder.mkdir(exist_ok=True)
    (folder / "a.mkv").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    dataset = scan_dataset(folder, FIVE)
    assert len(dataset.items) + sum(problem.kind != "variable" for problem in dataset.problems) == 1


def test_a_video_is_upright_and_in_the_shape_of_its_bucket(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", 20, size=(64, 48))
    monkeypatch.setattr("autotune.data.pixels._rotation", lambda frame: 90)
    (item,) = read_dataset(tmp_path, FIVE).items
    assert (item.width_px, item.height_px) == (48, 64)
    assert open_pixels([path], 32, 64, item.span).shape == (3, 5, 64, 32)
