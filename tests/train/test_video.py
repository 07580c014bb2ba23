"""A video model trains on video files, and shows what it has learned as clips."""

from pathlib import Path

from PIL import Image

from autotune.data.pixels import read_facts
from autotune.train.run import train
from autotune.train.sample import SampleRequest, read_sample_inputs, sample_run
from tests.data.pictures import write_pictures, write_video
from tests.small import write_small_pipeline
from tests.train.small import machine, make_plan


def test_a_run_on_videos_and_images_writes_clips(tmp_path: Path) -> None:
    data, hardware = tmp_path / "data", machine()
    write_pictures(data, (32, 32))
    write_video(data / "fox.mp4", 20, size=(32, 32))
    Image.new("L", (32, 32), 128).save(data / "fox.mask.png")
    write_small_pipeline("wan-2.1", tmp_path / "model", ["a red fox in the snow"])
    plan = make_plan(
        tmp_path / "model", data, hardware, num_frames=5, num_steps=2, caption=("a red fox in the "
                                                                               "snow"),
        flip=True, shuffle_tags=2, loss_mask="files", cache="memory",
        data=str(data), output=str(tmp_path / "run"), preview_prompts=("a red fox in the "
                                                                       "snow",), preview_every=0,
    )  # fmt: skip
    assert sorted(bucket.num_frames for bucket in plan.frozen.workload.buckets) == [1, 5]
    report = train(plan, hardware, tmp_path / "cache")
    assert report.num_steps == 2
    assert not list((tmp_path / "cache").glob("*"))
    clips = [tmp_path / "run" / f"sample_{name}_adapter.mp4" for name in ("with", "without")]
    written = sample_run(
        read_sample_inputs(tmp_path / "run", SampleRequest("a red fox in the snow", num_steps=2)),
        hardware,
        tmp_path,
    )
    assert [path.name for path in written] == ["sample-0.mp4"]
    for clip in (*clips, *written):
        facts = read_facts(clip)
        assert (facts.width_px, facts.height_px, round(facts.duration_seconds * 16)) == (32, 32, 5)
        assert clip.with_suffix(".png").exists() == (clip not in written)
