"""Does any content of a foreign file end in a typed error? Coverage-guided, one process a reader.

    python -m venv --system-site-packages ENV; ENV/bin/pip install atheris
    PYTHONPATH=. nice ENV/bin/python -P -m benchmarks.faults.fuzz [READER...] [--seconds 60]

Each reader begins with a sound file of its kind. Whatever is no typed error, takes longer than 10
seconds or more than 2 GiB stops it. Writes one JSON line for each reader, with its inputs.
"""

import argparse
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

SEED, MAX_BYTES, MAX_SECONDS, MAX_MIB = 45, 4096, 10, 2048
# Configurations as the trainers' own files begin.
CONFIGS = {
    "config.yaml": b"job: extension\nconfig:\n  process:\n  - type: sd_trainer\n    network:\n"
    b"      linear: 16\n    model:\n      name_or_path: Qwen/Qwen-Image\n",
    "config.toml": b'pretrained_model_name_or_path = "a"\nnetwork_dim = 8\nblocks_to_swap = 4\n',
    "config.json": b'{"model_type": "flux", "lora_rank": 16, "pretrained_model_path": "a"}',
    "run.sh": b"accelerate launch train_dreambooth_lora_flux.py --rank=16 --resolution 512\n",
}


def make_readers() -> dict[str, tuple[str, list[bytes], Callable[[Path], Any]]]:
    """Return for each reader the name of its file, sound contents, and what reads it."""
    import torch
    from PIL import Image
    from safetensors.torch import save

    from autotune.data.dataset import check_dataset
    from autotune.data.pixels import choose_spans, open_pixels, read_clip, read_facts, read_size
    from autotune.interop.importing import import_config
    from autotune.machine.probe import load_profile
    from autotune.models.single_file import open_single_file, recognize
    from autotune.plan.file import load_plan, parse_plan, plan_text
    from autotune.share.store import parse_record
    from autotune.train.folder import read_report
    from autotune.train.metrics import read_metrics
    from autotune.weights.adapters import read_adapter
    from autotune.weights.files import read_config, read_header, read_index, read_model_index
    from tests.share.examples import machine, plan, record

    def picture(kind: str, **options: Any) -> bytes:
        image = Image.effect_noise((40, 30), 9).convert("RGB")
        image.save(content := io.BytesIO(), kind, **options)
        return content.getvalue()

    def video() -> bytes:
        import av

        content = io.BytesIO()
        with av.open(content, "w", format="mp4") as file:
            stream = file.add_stream("mpeg4", rate=8)
            stream.width, stream.height = 32, 32
            for _ in range(5):
                image = Image.effect_noise((32, 32), 9).convert("RGB")
                file.mux(stream.encode(av.VideoFrame.from_image(image)))
            file.mux(stream.encode(None))
        return content.getvalue()

    def as_record(path: Path) -> None:
        import hashlib

        content = path.read_bytes()
        folder = record().key.partition("/")[0]
        parse_record(content, f"{folder}/{hashlib.sha256(content).hexdigest()}.json")

    def folder_of(path: Path) -> None:
        check_dataset(path.parent, resolution_px=64, multiple_px=16, max_side_px=4096)

    def pictures(path: Path) -> None:
        for read in (partial(read_size, decode=True), lambda path: open_pixels([path], 16, 16)):
            with suppress(OSError):  # as both say
                read(path)

    def clips(path: Path) -> None:
        with suppress(OSError):
            facts = read_facts(path)
            for span in choose_spans(facts, "head", (2,), 8.0):
                for _ in read_clip(path, span):
                    pass

    tensors = {"transformer.a.lora_A.weight": torch.zeros(2, 4)}
    tensors["transformer.a.lora_B.weight"] = torch.zeros(4, 2)
    weights = [save(tensors), save({"x_embedder.weight": torch.zeros(3, dtype=torch.bfloat16)})]
    made = plan()
    readers: dict[str, tuple[str, list[bytes], Callable[[Path], Any]]] = {
        "plan": ("plan.yaml", [plan_text(made).encode()], load_plan),
        "study": (
            "plan.json",
            [made.model_dump_json().encode()],
            lambda path: parse_plan(path.read_text()),
        ),
        "record": ("record.json", [record().content], as_record),
        "profile": ("hardware.json", [machine().model_dump_json().encode()], load_profile),
        "header": ("a.safetensors", weights, read_header),
        "adapter": ("b.safetensors", weights, read_adapter),
        "single-file": (
            "c.safetensors", weights, lambda path: recognize(open_single_file(path)),
        ),
        "shards": (
            "model.safetensors.index.json", [b'{"weight_map": {"a": "b.safetensors"}}'], read_index,
        ),
        "model-index": (
            "model_index.json",
            [b'{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}'],
            lambda path: read_model_index(path.parent),
        ),
        "model-config": ("config.json", [b'{"num_layers": 4, "axes": [1, 2]}'], read_config),
        "report": ("report.json", [b'{"num_steps": 3}'], lambda path: read_report(path.parent)),
        "metrics": ("metrics.jsonl", [b'{"step": 1, "loss": 0.5}\n' * 2], read_metrics),
        "captions": (
            "metadata.jsonl", [b'{"file_name": "a.png", "text": "a cat"}\n'], folder_of,
        ),
        "table": ("metadata.csv", [b"file_name,text\na.png,a cat\n"], folder_of),
        "picture": (
            "a.png",
            [picture("PNG"), picture("JPEG"), picture("WEBP"), picture("GIF")],
            pictures,
        ),
        "video": ("a.mp4", [video()], clips),
    }  # fmt: skip
    for name, content in CONFIGS.items():
        readers[name] = name, [content], import_config
    return readers


def fuzz(name: str, seconds: int) -> None:
    """Feed one reader until the time is over, or it fails."""
    import atheris

    with atheris.instrument_imports(include=["autotune"]):
        readers = make_readers()
    from autotune.errors import BUG, explain_error

    logging.disable()
    warnings.simplefilter("ignore")
    file, seeds, read = readers[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        corpus, path = Path(folder, "corpus"), Path(folder, "files", file)
        corpus.mkdir()
        path.parent.mkdir()
        for number, content in enumerate(seeds):
            (corpus / str(number)).write_bytes(content)

        def check(content: bytes) -> None:
            path.write_bytes(content)
            try:
                read(path)
            except Exception as error:
                if explain_error(error).hint.startswith(BUG):
                    traceback.print_exc()
                    raise

        for content in seeds:  # imports take longer than an input may
            check(content)

        longest = max([MAX_BYTES, *(2 * len(content) for content in seeds)])
        limits = {"seed": SEED, "max_len": longest, "timeout": MAX_SECONDS}
        limits |= {"rss_limit_mb": MAX_MIB, "max_total_time": seconds, "print_final_stats": 1}
        options = [f"-{key}={value}" for key, value in limits.items()]
        atheris.Setup([name, *options, f"-artifact_prefix={folder}/", str(corpus)], check)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--alone", help="fuzz this one in this process")
    asked = parser.parse_args()
    if asked.alone:
        fuzz(asked.alone, asked.seconds)
    for name in asked.readers or make_readers():
        command = [sys.executable, "-P", "-m", "benchmarks.faults.fuzz", "--alone", name]
        done = subprocess.run(
            [*command, "--seconds", str(asked.seconds)], capture_output=True, check=False
        )
        told = done.stderr.decode(errors="replace")
        counts = dict(re.findall(r"stat::(\w+): +(\d+)", told))
        found = re.findall(r"cov: (\d+)", told)
        row = {"reader": name, "inputs": int(counts.get("number_of_executed_units", 0))}
        row |= {"seconds": asked.seconds, "coverage": int(found[-1]) if found else 0}
        row |= {"peak_mib": int(counts.get("peak_rss_mb", 0)), "failed": done.returncode != 0}
        print(
            json.dumps(
                row | {"told": re.sub("INFO.*\n", "", told)[-2500:] if done.returncode else ""}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
