"""How fast and with how much memory do weights load and save? Each loader against plain
`from_pretrained`, paired.

    PYTHONPATH=. python benchmarks/weights.py --gigabytes 1 4 --repetitions 5 --output
    benchmarks/results

Rows are added to the file of the day and size, so a long measurement can be made in pieces
(`--cases`, `--keep`).

Every load runs in a fresh process, forked from a server that has only imported the libraries. All
methods take turns within a repetition, so that drift of a shared machine meets them alike. The
clock covers building the model, loading, and reading one byte of every page of its weights, or a
memory map would count as loaded before a byte was read. Memory is sampled every 2 ms from
/proc/self/status: `anonymous` is what the process really takes (shared anonymous memory included),
`mapped` is file pages that the system can drop, `resident` the most of both at one time. A load
that is not counted goes before each case. Cold means that the files were dropped from the page
cache (posix_fadvise) just before.
"""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

CASES = ("bf16-cold", "bf16-warm", "int8-warm", "nf4-warm", "save")
QUANTIZED = {"int8": "torchao-int8", "nf4": "bnb-nf4"}
METHODS = ("from_pretrained", "safetensors", "pread", "fastsafetensors")
THEN_QUANTIZE = (
    "from_pretrained, quantize_"  # the other way by which people come to a quantized model
)
SAVERS = ("save_pretrained", "save_shards")
BLOCKS_PER_GB = 5.6  # of the reduced Qwen-Image below, in bf16
PEAKS = ("peak_anonymous_bytes", "peak_mapped_bytes", "peak_resident_bytes")
MIB = 1 << 20


class MemorySampler:
    """Largest anonymous and mapped resident bytes while it runs, beyond those at its start."""

    def __enter__(self):
        self.peaks = dict.fromkeys(PEAKS, 0)
        self.stop = threading.Event()
        self.base = self._read()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()

    def _run(self):
        while not self.stop.wait(0.002):
            now = self._read()
            self.peaks = {key: max(self.peaks[key], now[key] - self.base[key]) for key in now}

    def _read(self):
        lines = Path("/proc/self/status").read_text().splitlines()
        table = dict(line.split(":", 1) for line in lines)
        of = {key: int(table[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem", "RssFile")}
        anonymous = of["RssAnon"] + of["RssShmem"]
        return dict(zip(PEAKS, (anonymous, of["RssFile"], anonymous + of["RssFile"]), strict=True))


def build(num_layers):
    import torch
    from diffusers import QwenImageTransformer2DModel

    from autotune.weights.building import build_empty

    return build_empty(
        lambda: QwenImageTransformer2DModel(**config(num_layers)), dtype=torch.bfloat16
    )


def config(num_layers):
    return {"num_layers": num_layers, "num_attention_heads": 12}  # half the width of Qwen-Image


def write_checkpoint(folder, num_layers):
    from autotune.weights.streaming import fill_random

    model = build(num_layers)
    fill_random(model, seed=0)
    model.save_config(folder)
    save(folder, model)


def save(folder, model):
    from autotune.weights.saving import save_shards

    state = model.state_dict()
    sizes = {name: tensor.nbytes for name, tensor in state.items()}
    stem = "diffusion_pytorch_model"
    save_shards(
        folder,
        sizes,
        lambda names: {n: state[n] for n in names},
        stem=stem,
        max_shard_bytes=2 * 10**9,
    )


def load(method, storage, folder, num_layers):
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from autotune.quantization.layers import quantize_inside
    from autotune.weights.building import from_pretrained_dtypes
    from autotune.weights.sources import open_weights
    from autotune.weights.streaming import load_into

    if method in ("from_pretrained", THEN_QUANTIZE):
        model = plain_load(folder, None if method == THEN_QUANTIZE else storage)
        if method == THEN_QUANTIZE:
            quantize_(model, Int8WeightOnlyConfig())
        return model

    model = build(num_layers)
    chosen = QUANTIZED.get(storage)
    load_into(
        model,
        open_weights(folder),
        loader=method,
        dtype_policy=from_pretrained_dtypes(model, torch.bfloat16),
        transform=quantize_inside([model], chosen) if chosen else None,
    )
    return model


def plain_load(folder, storage):
    """With diffusers' own quantization. It refuses bitsandbytes without an accelerator; only
    that check is left out.
    """
    import torch
    from diffusers import BitsAndBytesConfig, QwenImageTransformer2DModel, TorchAoConfig
    from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer
    from torchao.quantization import Int8WeightOnlyConfig

    workload_overrides: dict[str, Any] = {"torch_dtype": torch.bfloat16}
    if storage == "int8":
        workload_overrides["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    elif storage == "nf4":
        workload_overrides["device_map"] = {"": "cpu"}
        workload_overrides["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    with mock.patch.object(BnB4BitDiffusersQuantizer, "validate_environment"):
        return QwenImageTransformer2DModel.from_pretrained(folder, **workload_overrides)


def touch(model):
    import torch

    for tensor in model.parameters():
        if type(tensor.data) is torch.Tensor:
            tensor.data.reshape(-1).view(torch.uint8)[::4096].sum()


def run_load(queue, method, storage, cache, folder, num_layers):
    from autotune.runtime.quiet import silence_libraries, silence_progress_bars

    silence_libraries()
    silence_progress_bars()
    if cache == "cold":
        drop_from_cache(folder)
    with MemorySampler() as memory:
        start = time.perf_counter()
        model = load(method, storage, folder, num_layers)
        touch(model)
        seconds = time.perf_counter() - start
    queue.put({"seconds": round(seconds, 4), **memory.peaks})


def run_save(queue, method, folder, num_layers):
    from autotune.weights.streaming import fill_random

    model = build(num_layers)
    fill_random(model, seed=0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as target, MemorySampler() as memory:
        os.sync()
        start = time.perf_counter()
        if method == "save_pretrained":
            model.save_pretrained(target, max_shard_size="2GB")
            os.sync()  # ours ends on the disk, so the other must too
        else:
            save(Path(target), model)
        seconds = time.perf_counter() - start
    queue.put({"seconds": round(seconds, 4), **memory.peaks})


def drop_from_cache(folder):
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_fresh_process(context, target, *arguments):
    queue = context.Queue()
    process = context.Process(target=target, args=(queue, *arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{target.__name__}{arguments} ended with status {process.exitcode}")
    return queue.get(timeout=10)


def measure(context, folder, gigabytes, repetitions, cases):
    num_layers = round(gigabytes * BLOCKS_PER_GB)
    if not folder.exists():
        folder.mkdir(parents=True)
        in_fresh_process(context, write_and_answer, folder, num_layers)
        os.sync()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for case in cases:
        storage, _, cache = case.partition("-")
        methods = (
            SAVERS if case == "save" else METHODS + ((THEN_QUANTIZE,) if storage == "int8" else ())
        )
        what = {"action": "load", "storage": storage, "cache": cache}
        target: Callable[..., Any] = run_load
        of_case: tuple[str, ...] = (storage, cache)
        if case == "save":
            what, target, of_case = (
                {"action": "save", "storage": "bf16", "cache": "-"},
                run_save,
                (),
            )
        in_fresh_process(context, target, methods[0], *of_case, folder, num_layers)
        for repetition in repetitions:
            for method in in_turn(methods, repetition):
                result = in_fresh_process(context, target, method, *of_case, folder, num_layers)
                of_run = {"method": method, "repetition": repetition, "checkpoint_bytes": size}
                yield {**what, **of_run, **result, "load_average": os.getloadavg()[0]}


def in_turn(methods, repetition):
    """Each method comes in each place, after another one forwards than backwards: none always
    meets the same rest.
    """
    by = repetition // 2 % len(methods)
    turned = methods[by:] + methods[:by]
    return turned[::-1] if repetition % 2 else turned


def write_and_answer(queue, folder, num_layers):
    write_checkpoint(folder, num_layers)
    queue.put(None)


def summary(rows, machine):
    lines = [f"# Loading and saving weights, {machine['date']}", ""]
    lines += [f"{key}: {value}  " for key, value in machine.items() if key != "date"]
    lines += [
        "",
        __doc__.split("\n\n")[3].replace("\n", " "),
        "",
        "Median (smallest to largest).",
        "",
    ]
    lines += [
        "| GB | what | method | seconds | vs diffusers | anonymous MiB | mapped | resident |",
        "|" + "---|" * 8,
    ]
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for row in rows:
        key = (row["checkpoint_bytes"], row["action"], row["storage"], row["cache"])
        groups.setdefault(key, {}).setdefault(row["method"], []).append(row)
    for (size, action, storage, cache), methods in sorted(groups.items()):
        reference = [
            row["seconds"] for row in methods[(METHODS if action == "load" else SAVERS)[0]]
        ]
        for method, found in sorted(
            methods.items(), key=lambda item: (*METHODS, THEN_QUANTIZE, *SAVERS).index(item[0])
        ):
            seconds = [row["seconds"] for row in found]
            # Paired: each repetition against plain diffusers in the same repetition.
            ratio = statistics.median(a / b for a, b in zip(seconds, reference, strict=True))
            anonymous, mapped, resident = ([row[key] / MIB for row in found] for key in PEAKS)
            lines.append(
                f"| {size / 1e9:.1f} | {action} {storage} {cache} | {method} | "
                f"{spread(seconds, 2)} | {ratio:.2f} "
                f"| {spread(anonymous, 0)} | {statistics.median(mapped):.0f} | "
                f"{statistics.median(resident):.0f} |"
            )
    return "\n".join(lines) + "\n"


def spread(values, digits):
    return (
        f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to "
        f"{max(values):.{digits}f})"
    )


def describe_machine():
    cpu = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    versions = ("torch", "diffusers", "safetensors", "fastsafetensors", "torchao", "bitsandbytes")
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} x {cpu[0] if cpu else platform.processor()}, no GPU",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.platform(),
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in versions),
        "load average at start": f"{os.getloadavg()[0]:.1f}",
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cases", choices=CASES, nargs="+", default=CASES)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first repetition, where earlier ones exist",
    )
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the checkpoint for the next piece"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "diffusers.models.transformers.transformer_qwenimage", "torchao"]
    )
    machine = describe_machine()
    options.output.mkdir(parents=True, exist_ok=True)
    repetitions = range(options.first, options.first + options.repetitions)
    for gigabytes in options.gigabytes:
        results = options.output / f"weights-{machine['date']}-{gigabytes:g}gb.jsonl"
        folder = options.scratch / f"weights-{gigabytes:g}gb" / "model"
        if not results.exists():
            results.write_text(json.dumps(machine) + "\n")
        try:
            for row in measure(context, folder, gigabytes, repetitions, options.cases):
                with results.open("a") as log:
                    log.write(json.dumps(row) + "\n")
                print(
                    row["action"],
                    row["method"],
                    row["storage"],
                    row["cache"],
                    row["seconds"],
                    flush=True,
                )
        finally:
            if not options.keep:
                shutil.rmtree(folder.parent)
        first, *rows = map(json.loads, results.read_text().splitlines())
        results.with_suffix(".md").write_text(summary(rows, first))
        print(summary(rows, first))


if __name__ == "__main__":
    main()
