"""Does any content of a foreign file end in a typed error? Coverage-guided, one fork a reader.

    python -m venv --system-site-packages ENV; ENV/bin/pip install atheris
    PYTHONPATH=. nice ENV/bin/python -P -m benchmarks.faults.fuzz [READER...] [--seconds 60]

Each reader begins with a sound file of its kind; half of the inputs are files whose values were
replaced by odd ones, whose digests are true. Whatever is no typed error, takes longer than 10
seconds or more than 2 GiB stops it. Writes one JSON line for each reader, with its inputs.
"""

import argparse
import io
import json
import logging
import math
import os
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from autotune.plan.base import digest_of

MAX_BYTES, MAX_SECONDS, MAX_MIB = 4096, 10, 2048
Reader = tuple[str, list[bytes], Callable[[Path], Any]]
# Configurations as the trainers' own files begin.
CONFIGS = {
    "config.yaml": b"job: extension\nconfig:\n  process:\n  - type: sd_trainer\n    network:\n"
    b"      linear: 16\n    model:\n      name_or_path: Qwen/Qwen-Image\n",
    "config.toml": b'pretrained_model_name_or_path = "a"\nnetwork_dim = 8\nblocks_to_swap = 4\n',
    "config.json": b'{"model_type": "flux", "lora_rank": 16, "pretrained_model_path": "a"}',
    "run.sh": b"accelerate launch train_dreambooth_lora_flux.py --rank=16 --resolution 512\n",
}


ODD: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -1e-320, math.inf)
ODD += (math.nan, "", "\ud800", "a" * 3000, "\0", "../a", "$(id)", "1e999", [], {}, [[]], {"": 0})


def mutate_value(content: bytes, chance: random.Random) -> bytes | None:
    """Put odd values, or others of its own, into the JSON or YAML of a file or of a header."""
    head = content[:8] if content[8:9] == b"{" else b""
    size = int.from_bytes(head, "little") if head else len(content)
    text, rest = content[len(head) : len(head) + size], content[len(head) + size :]
    try:
        value = json.loads(text) if text[:1] in b"{[" else yaml.load(text, Loader=yaml.CSafeLoader)
        places = list(list_places(value))
        for _ in range(chance.choice((1, 1, 2, 5))):
            at, key = chance.choice(places)
            other, own = chance.choice(places)
            at[key] = chance.choice((*ODD, other[own]))
        if isinstance(value.get("frozen"), dict):
            value["digest"] = digest_of(value["frozen"])
        text = json.dumps(value).encode()
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError):
        return None
    return (len(text).to_bytes(8, "little") if head else b"") + text + rest


def list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container with each of its keys, inner ones too."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield value, key
        if isinstance(one, dict | list):
            yield from list_places(one)


def make_readers() -> dict[str, Reader]:  # noqa: PLR0915
    """Return for each reader the name of its file, sound contents, and what reads it."""
    import torch
    from PIL import Image
    from safetensors.torch import save

    from autotune.data.cache import Cache
    from autotune.data.captions import last_edit
    from autotune.data.dataset import check_dataset, list_folders
    from autotune.data.pixels import (
        choose_spans,
        explain_damage,
        open_pixels,
        read_clip,
        read_facts,
        read_size,
    )
    from autotune.interop.importing import import_config
    from autotune.machine.catalog import read_prices
    from autotune.machine.probe import load_profile
    from autotune.models.registry import get_family
    from autotune.models.single_file import open_single_file, recognize
    from autotune.plan.file import load_plan, parse_plan, plan_text
    from autotune.report.plan import explain_lines, plan_lines
    from autotune.share.store import name_of, parse_record, shareable_machine
    from autotune.share.warm_start import compare
    from autotune.train.folder import Checkpoints, read_report
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

    names = "autotune.data.cache", "autotune.train.folder"
    of_cache, of_folder = map(import_module, names)  # their digests are taken as true
    vars(of_cache)["tensors_digest"] = lambda tensors: ""
    vars(of_folder)["_digest"] = lambda metadata, tensors: metadata["digest"]
    made, own = plan(), record()
    work, here = made.frozen.workload, shareable_machine(machine())
    folder = own.key.partition("/")[0]

    def as_record(path: Path) -> None:
        content = path.read_bytes()
        compare(parse_record(content, f"{folder}/{name_of(content)}.json"), here, work)

    def as_plan(path: Path) -> None:
        read = parse_plan(path.read_text())
        plan_text(read), plan_lines(read), explain_lines(read)

    def checkpoint(path: Path) -> None:
        for other in path.parent.iterdir():
            if other != path:
                other.unlink()
        with Checkpoints(path.parent, "key", keep_last=1) as checkpoints:
            checkpoints.newest()

    def folder_of(path: Path) -> None:
        check_dataset(path.parent, get_family("flux1-dev"), resolution_px=64)

    def pictures(path: Path) -> None:
        for read in (partial(read_size, decode=True), lambda path: open_pixels([path], 16, 16)):
            try:
                read(path)
            except Exception as error:  # as all that decode say
                explain_damage(error)

    def clips(path: Path) -> None:
        try:
            for span in choose_spans(read_facts(path), "head", (2,), 8.0):
                for _ in read_clip(path, span):
                    pass
        except Exception as error:
            explain_damage(error)

    tensors = {"transformer.a.lora_A.weight": torch.zeros(2, 4)}
    tensors["transformer.a.lora_B.weight"] = torch.zeros(4, 2)
    weights = [save(tensors), save({"x_embedder.weight": torch.zeros(3, dtype=torch.bfloat16)})]
    tensors["transformer.a.lora_B.weight"] += 1
    states = ['{"step": 3}', '{"step": "/../../a"}', '[["step", 1e400]]', "7", "[" * 9999]
    readers: dict[str, Reader] = {
        "plan": ("plan.yaml", [plan_text(made).encode()], load_plan),
        "study": ("plan.json", [made.model_dump_json().encode()], as_plan),
        "record": ("record.json", [own.content], as_record),
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
        "metrics": (
            "metrics.jsonl",
            [b'{"step": 1, "loss": 0.5}\n' * 2],
            lambda path: [*read_metrics(path)],
        ),
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
        "caption": ("a.txt", ["a cat, 4k".encode(x) for x in ("utf-8", "utf-16")], folder_of),
        "lists": ("a.yaml", [b"folders:\n- {path: photos, repeats: 2}"], list_folders),
        "prices": ("a.yaml", [b"currency: USD\nper_hour:\n  h200: 3.5\n  4090: 1"], read_prices),
        "undo": ("undo.jsonl", [b'{"what": "a", "was": [["a.txt", null]]}\n'], last_edit),
        "checkpoint": (
            "checkpoint-000003.safetensors",
            [save(tensors, {"run": "key", "digest": "", "state": state}) for state in states],
            checkpoint,
        ),
        "cached": (
            "key.safetensors", [save(tensors, {"key": "key", "digest": ""})],
            lambda path: Cache(path.parent).read("key"),
        ),
    }  # fmt: skip
    for name, content in CONFIGS.items():
        readers[name] = name, [content], import_config
    return readers


def fuzz(name: str, reader: Reader, seconds: int, seed: int) -> None:
    """Feed one reader until the time is over, or it fails."""
    import atheris

    from autotune.errors import BUG, explain_error

    file, seeds, read = reader
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

        def mutate(content: bytes, longest: int, number: int) -> bytes:
            chance = random.Random(number)
            found = mutate_value(content, chance) if chance.random() < 0.5 else None
            return found[:longest] if found else atheris.Mutate(content, longest)

        longest = max([MAX_BYTES, *(2 * len(content) for content in seeds)])
        limits = {"seed": seed, "max_len": longest, "timeout": MAX_SECONDS}
        limits |= {"rss_limit_mb": MAX_MIB, "max_total_time": seconds, "print_final_stats": 1}
        options = [f"-{key}={value}" for key, value in limits.items()]
        options += [f"-artifact_prefix={folder}/", str(corpus)]
        atheris.Setup([name, *options], check, custom_mutator=mutate)
        atheris.Fuzz()


def main() -> None:
    import atheris

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=45)
    asked = parser.parse_args()
    with atheris.instrument_imports(include=["autotune"]):
        readers = make_readers()
    logging.disable()
    warnings.simplefilter("ignore")
    for name in asked.readers or readers:
        with tempfile.TemporaryFile() as log:
            if (child := os.fork()) == 0:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                fuzz(name, readers[name], asked.seconds, asked.seed)
                os._exit(1)  # libFuzzer ends the process
            status = os.waitpid(child, 0)[1]
            log.seek(0)
            told = log.read().decode(errors="replace")
        counts = dict(re.findall(r"stat::(\w+): +(\d+)", told))
        found = re.findall(r"cov: (\d+)", told)
        row = {"reader": name, "inputs": int(counts.get("number_of_executed_units", 0))}
        row |= {"seconds": asked.seconds, "coverage": int(found[-1]) if found else 0}
        row |= {"peak_mib": int(counts.get("peak_rss_mb", 0)), "failed": status != 0}
        row |= {"told": re.sub("INFO.*\n", "", told)[-2500:] if status else ""}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
