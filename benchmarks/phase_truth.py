"""Memory of each phase at full size: what a plan promises against what torch's allocator holds.

As `allocator_truth.py`, of which it is a second part: loading, caching, training, previews and
saving of a model's complete pipeline, whose files are sparse: they have sizes, but no blocks.

    export FAKEGPU=h100 FAKEGPU_COPIES=0
    tests/fakegpu/run benchmarks/phase_truth.py ROWS.jsonl MODEL SIDE_PX [KNOB=VALUE,...]...
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import allocator_truth
import diffusers
import torch
import transformers
import yaml

ENCODERS = yaml.safe_load((Path(__file__).parent / "data/text_encoders.yaml").read_text())
PHASES = {"loading": "load", "caching": "cache", "training": "train", "previews": "preview"}
PHASES["saving"] = "save"
WORD = "photo"  # one token of the small tokenizers


def write_pipeline(family: Any, model: Any, folder: Path) -> None:
    """Write a small pipeline, and then its parts anew as they are published, without numbers."""
    from tests.small import write_small_pipeline

    write_small_pipeline(family, folder, [" ".join([WORD] * 8), f"{WORD} {WORD}"])
    parts = dict(zip(family.text_encoders, model.parts.text_encoder_parameters, strict=True))
    if (index_file := folder / "model_index.json").exists():
        index = json.loads(index_file.read_text())
        index.pop("text_encoder_select_layers", None)  # Krea 2's own are the class's defaults
        index_file.write_text(json.dumps(index))
    for config_file in sorted(folder.glob("*/config.json")):
        name = config_file.parent.name
        config = json.loads(config_file.read_text())
        if name in ("transformer", "unet") or "transformer" in name:
            from autotune.models.family import public_config

            built: Any = family.transformer_class, public_config(model.config)
        elif name == "vae":
            built = model.parts.vae_class, model.parts.vae_config
        elif name in parts and parts[name] in ENCODERS:
            built = None, ENCODERS[parts[name]]
        else:
            built = None, None
        _write_part(config_file.parent, config, *built, num_parameters=parts.get(name))


def _write_part(
    folder: Path, config: dict[str, Any], kind: str | None, changes: Any, *, num_parameters: Any
) -> None:
    with torch.device("meta"):
        if "architectures" in config:
            known = _merged(config, changes or {})
            made = getattr(transformers, config["architectures"][0])
            model: Any = made(made.config_class.from_dict(known))
            model.config.save_pretrained(folder)
        else:
            name = kind or config["_class_name"]
            made = getattr(diffusers, name, None) or _class_of_ltx(name)
            model = made.from_config(dict(changes or {}))
            if getattr(model.config, "latents_mean", ()) is None:  # that of MiniMax H3's sound
                latents = model.config.latent_channels
                model.register_to_config(latents_mean=[0.0] * latents, latents_std=[1.0] * latents)
            model.save_config(folder)
    stored = {
        id(tensor): (name, tensor)
        for name, tensor in reversed(model.state_dict(keep_vars=True).items())
    }
    count = sum(tensor.numel() for _, tensor in stored.values() if tensor.requires_grad)
    if num_parameters is not None and count != num_parameters:
        sys.stderr.write(f"{folder.name}: {count} parameters, not {num_parameters}\n")
        raise SystemExit(1)
    (file,) = folder.glob("*.safetensors")
    write_sparse(file, dict(reversed(list(stored.values()))))


def _class_of_ltx(name: str) -> Any:
    from diffusers.pipelines import ltx2

    return getattr(ltx2, name)


def _merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    if "num_hidden_layers" in changes:
        found.pop("layer_types", None)
    for key, value in changes.items():
        own = found.get(key)
        found[key] = _merged(own, value) if isinstance(own, dict) and "token" not in key else value
    return found


SHARD_BYTES = 8 << 30  # at most of a file, which is mapped as a whole


def write_sparse(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write safetensors files of bf16, and their index, whose numbers are a hole."""
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, tensor in tensors.items():
        kind, size = ("BF16", 2) if tensor.is_floating_point() else ("I64", 8)
        if end > SHARD_BYTES:
            shards, end = [*shards, {}], 0
        end += tensor.numel() * size
        shards[-1][name] = {"dtype": kind, "shape": [*tensor.shape]}, tensor.numel() * size
    path.unlink()
    places = {}
    for number, sizes in enumerate(shards):
        header, end = {}, 0
        for name in sorted(sizes):  # as the library does
            entry, size = sizes[name]
            header[name] = {**entry, "data_offsets": [end, end + size]}
            end += size
        shard = path.with_name(f"{path.stem}-{number:05}.safetensors")
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with shard.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        places.update(dict.fromkeys(header, shard.name))
    index = json.dumps({"metadata": {}, "weight_map": places})
    path.with_name(f"{path.name}.index.json").write_text(index)


def list_models() -> dict[str, tuple[Any, Any]]:
    from autotune.models.registry import FAMILIES

    return {each.name: (family, each) for family in FAMILIES.values() for each in family.models}


def measure(name: str, side_px: int, text: str, known: dict[str, Any] | None = None) -> Any:
    """Measure a row, or predict one that is `known` again."""
    with tempfile.TemporaryDirectory() as scratch:
        write_pipeline(*list_models()[name], Path(scratch, "model"))
        problem = Problem(Path(scratch), name, side_px, text)
        row = {"machine": os.environ["FAKEGPU"], "model": name, "side_px": side_px}
        row |= {"settings": text, "torch": torch.__version__}
        measured = known["measured"] if known else problem.measure()
        return row | {"measured": measured, "predicted": problem.predict()}


class Problem:
    """A pipeline's files, and one item at batch size 1 with all blocks checkpointed."""

    def __init__(self, scratch: Path, name: str, side_px: int, text: str) -> None:
        from autotune.cost.predict import CostModel
        from autotune.machine.probe import probe
        from autotune.models.resolve import read_parts, resolve_model
        from autotune.plan.candidate import Candidate
        from autotune.plan.job import ModelRef
        from autotune.plan.workload import WorkloadRequest
        from autotune.train.workload import describe_workload

        pairs = (pair.split("=") for pair in text.split(",") if pair)
        changes = {key: int(value) if value.isdigit() else value for key, value in pairs}
        self.scratch, self.hardware = scratch, probe()
        self.model = resolve_model(ModelRef.of(str(scratch / "model")))
        family, config = self.model.family, self.model.config
        size: Any = {
            "resolution": (side_px, side_px),
            "text_tokens": min(512, family.max_text_tokens),
            "num_frames": changes.pop("frames", 1),
        }
        asked = WorkloadRequest(rank=16, effective_batch_size=1, **size)
        self.work = describe_workload(self.model, None, asked).changed(quality="compact")
        fixed = {"checkpointed_blocks": self.work.model.num_blocks, "allocator": "expandable"}
        self.candidate = Candidate.model_validate({"micro_batch_size": 1, **fixed, **changes})
        parts = read_parts(self.model)
        self.cost = CostModel.build(self.hardware, self.work, family, config, parts)

    def predict(self) -> dict[str, list[int]]:
        """Return bytes allocated and reserved by phase."""
        overhead = self.hardware.process_overhead_bytes
        found: dict[str, list[int]] = {}
        for each in self.cost.predict(self.candidate).phases:
            reserved = each.run_memory_bytes - overhead
            found[each.name] = [each.allocated_memory_bytes, reserved]
        return found

    def measure(self) -> dict[str, list[int]]:
        from autotune.data.encode import Encoders
        from autotune.knobs.settings import configure_allocator
        from autotune.search import rehearsal
        from autotune.search.worker import ChildState
        from autotune.train import model as building
        from autotune.train.monitor import Monitor
        from autotune.train.processes import set_device

        transformers.logging.set_verbosity_error()
        diffusers.logging.set_verbosity_error()
        # Of what no kernel computed.
        tensors: Any = torch.Tensor
        tensors.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)
        building.require_quality = lambda *_: None
        rehearsal.WORDS_PER_TOKEN = 1.0
        rehearsal.NUM_PREVIEW_STEPS = 2 if self.model.family.name == "minimax-h3" else 1
        found: dict[str, list[int]] = {}

        def record(phase: str) -> None:
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            before = found.get(phase, (0, 0))
            found[phase] = [max(pair) for pair in zip(before, peaks, strict=True)]

        def record_phase(monitor: Monitor, name: str, seconds: float) -> None:
            record(PHASES[name])
            stock_record(monitor, name, seconds)

        def end_captions(encoders: Encoders) -> None:
            record("captions")
            release_text(encoders)
            torch.cuda.reset_peak_memory_stats()

        stock_record, release_text = Monitor._record, Encoders.release_text
        monitors: Any = Monitor
        monitors._record = record_phase
        parts: Any = Encoders
        parts.release_text = end_captions
        configure_allocator(self.candidate.allocator)
        set_device(torch.device("cuda", 0))
        settings = self.model, self.work, self.candidate, "cuda:0"
        how: Any = {"caching": self.cost.caching, "scratch_folder": str(self.scratch)}
        request = rehearsal.RehearsalRequest(*settings, num_steps=1, max_seconds=0.0, **how)
        with allocator_truth.Counted():
            result = request.perform(ChildState())
        if "load" not in found or "captions" not in found:
            raise SystemExit(result.message)
        found["images"] = found["cache"]
        both = zip(found["captions"], found["images"], strict=True)
        return found | {"cache": [max(pair) for pair in both]}


def main() -> None:
    if sys.argv[1] != "--again":
        allocator_truth.main(measure)
        return
    file = Path(sys.argv[2])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for at, row in enumerate(rows):
        rows[at] = measure(row["model"], row["side_px"], row["settings"], row)
        print(row["model"], *(f"{k} {e:+.2%}" for k, e in errors_of(rows[at], 0).items()))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for at, what in enumerate(("allocated", "reserved")):
        for phase in PHASES.values():
            errors = [errors_of(row, at)[phase] for row in rows]
            worst = max(errors, key=abs)
            mean = sum(map(abs, errors)) / len(errors)
            print(f"{what} {phase}: {mean:.2%} in the mean, {worst:+.2%} at most, n {len(errors)}")


def errors_of(row: dict[str, Any], at: int) -> dict[str, float]:
    """Relative errors of predictions, allocated (0) or reserved (1)."""
    predicted, measured = row["predicted"], row["measured"]
    return {name: predicted[name][at] / measured[name][at] - 1 for name in PHASES.values()}


if __name__ == "__main__":
    main()
