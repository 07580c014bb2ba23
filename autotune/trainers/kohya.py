"""What musubi-tuner and sd-scripts have in common: names of options, files of options and of data sets."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.families import Family
from autotune.trainers.document import Document
from autotune.trainers.rules import (
    ALLOCATOR,
    ANY,
    LOST,
    Context,
    Rule,
    Values,
    batch,
    checkpointing,
    choice,
    duration,
    equal,
    named_arguments,
    number,
    schedule,
    whole,
)

SHIFTS_BY_RESOLUTION = ("flux_shift", "qwen_shift")
SCHEDULES = {name: name for name in ("constant", "constant_with_warmup", "linear", "cosine")}


def pair(key: str, name: str, values: Any) -> Mapping[str, Any]:
    """Arguments that are given as a list of `name=value`, less one of them."""
    found = named_arguments(values.get(key))
    rest = {other: value for other, value in found.items() if other != name}
    lost = {LOST: f"{', '.join(rest)}: autotune has no such argument"} if rest else {}
    return {"value": found.get(name), **lost}


def _weight_decay(values: Values, context: Context) -> Values:
    found = dict(pair("optimizer_args", "weight_decay", values))
    value = found.pop("value")
    return {"weight_decay": 0.01 if value is None else number(value), **found}


def _noise(values: Values, context: Context) -> Values:
    kind, lost = values["timestep_sampling"], {}
    if values.get("sigmoid_scale", 1) != 1:
        lost = {LOST: "autotune draws from the standard normal: a scale of 1"}
    if kind in SHIFTS_BY_RESOLUTION:
        return {"timestep_sampling": "logit_normal", "timestep_shift": "by_resolution", **lost}
    if kind == "shift":
        shift = number(values["discrete_flow_shift"])
        return {"timestep_sampling": "logit_normal", "timestep_shift": shift, **lost}
    if kind in ("sigmoid", "uniform"):
        sampling = {"sigmoid": "logit_normal", "uniform": "uniform"}[kind]
        return {"timestep_sampling": sampling, "timestep_shift": 1.0, **lost}
    return {LOST: "autotune draws noise levels by the family's usual density and shift"}


def _write_noise(ours: Values, context: Context) -> Values:
    shift = ours["timestep_shift"]
    if ours["timestep_sampling"] == "uniform":
        return {"timestep_sampling": "uniform", "discrete_flow_shift": None}
    if shift == "by_resolution":
        return {"timestep_sampling": shift_of(context.family), "discrete_flow_shift": None}
    return {"timestep_sampling": "shift", "discrete_flow_shift": shift}


def shift_of(family: Family) -> str:
    """The name of the shift by resolution for a family."""
    return "flux_shift" if family.name.startswith("flux") else "qwen_shift"


def _resolution(values: Values, context: Context) -> Values:
    written = next(values[key] for key in RESOLUTIONS if values.get(key) is not None)
    parts = str(written).split(",") if isinstance(written, str) else written if isinstance(written, list) else [written]
    sides = [whole(part) for part in parts]
    return {"resolution": sides[0] if len(set(sides)) == 1 else (sides[0], sides[-1])}


RESOLUTIONS = ("datasets[].resolution", "general.resolution", "resolution")
BATCHES = ("datasets[].batch_size", "general.batch_size", "train_batch_size")
ATTENTION_FLAGS = ("sdpa", "flash_attn", "xformers", "split_attn")
ATTENTION: Sequence[Any] = (
    ((True, ANY, ANY, ANY), ("native",)),
    ((ANY, True, ANY, True), ("flash",)),
    ((ANY, ANY, True, True), ("xformers",)),
    ((ANY, True, ANY, ANY), ("flash",)),
    ((ANY, ANY, True, ANY), ("xformers",)),
    ((None, None, None, ANY), ("native",)),
)

RULES: tuple[Rule, ...] = (
    Rule(
        RESOLUTIONS,
        ("resolution",),
        _resolution,
        lambda ours, _: {"general.resolution": [ours["resolution"], ours["resolution"]]},
        synonyms=RESOLUTIONS,
    ),
    batch(BATCHES, "gradient_accumulation_steps", "launch.num_processes", written="general.batch_size"),
    duration("max_train_steps", "max_train_epochs", epochs_win=True),
    schedule("lr_scheduler", "lr_warmup_steps", SCHEDULES),
    Rule(
        ("optimizer_args",),
        ("weight_decay",),
        _weight_decay,
        lambda ours, _: {"optimizer_args": [f"weight_decay={ours['weight_decay']}"]},
    ),
    choice("optimizer_type", "optimizer", {"AdamW": "adamw"}, instead="trains with AdamW in full precision"),
    Rule(
        ("timestep_sampling", "discrete_flow_shift", "sigmoid_scale"),
        ("timestep_sampling", "timestep_shift"),
        _noise,
        _write_noise,
    ),
    choice("weighting_scheme", "weighting_scheme", {"none": "none", "sigma_sqrt": "sigma_sqrt", "cosmap": "cosmap"}),
    checkpointing("gradient_checkpointing"),
    choice("mixed_precision", "precision", {"bf16": "bf16", "no": "fp32"}, instead="computes in bf16"),
    ALLOCATOR,
    *equal(
        """
        rank=network_dim lora_alpha=network_alpha lora_dropout=network_dropout
        learning_rate=learning_rate|unet_lr max_grad_norm=max_grad_norm
        swapped_blocks=blocks_to_swap seed=seed checkpointing_steps=save_every_n_steps
        preview_every=sample_every_n_steps data_workers=max_data_loader_n_workers
        """
    ),
)
DECIDED = {
    "images are always sorted into buckets by shape": "*.enable_bucket *.bucket_no_upscale enable_bucket "
    "bucket_no_upscale *.min_bucket_reso *.max_bucket_reso *.bucket_reso_steps min_bucket_reso max_bucket_reso "
    "bucket_reso_steps",
    "the number of steps decides, not how often a folder is repeated": "*.num_repeats num_repeats",
    "latents and captions are always cached, once": "*.cache_directory cache_latents cache_latents_to_disk "
    "cache_text_encoder_outputs cache_text_encoder_outputs_to_disk vae_batch_size skip_cache_check",
    "weights are read from a folder in the diffusers layout": "pretrained_model_name_or_path "
    "dit vae text_encoder* ae clip_l t5xxl vae_dtype",
    "what is copied ahead, and how files are read, is measured": "use_pinned_memory_for_block_swap "
    "block_swap_* disable_numpy_memmap disable_mmap_load_safetensors persistent_data_loader_workers",
    "it names the run or says how it is saved and logged": "output_dir output_name logging_dir log_* save_* metadata_* "
    "training_comment wandb_* no_metadata huggingface_* script launch.*",
    "previews are sampled as the family's pipeline does": "sample_*",
}
UNLEARNED = {
    "another schedule's shape": "lr_decay_steps lr_scheduler_num_cycles=1 lr_scheduler_power=1 "
    "lr_scheduler_timescale lr_scheduler_min_lr_ratio lr_scheduler_type lr_scheduler_args",
    "another adapter is loaded or merged first": "network_weights dim_from_weights base_weights*",
    "the size of the adapter's weights is limited": "scale_weight_norms",
    "noise levels are drawn otherwise": "min_timestep max_timestep preserve_distribution_shape num_timestep_buckets "
    "logit_mean logit_std=1.0 mode_scale noise_offset* multires_noise_iterations adaptive_noise_scale ip_noise_gamma*",
    "gradients are in 16 bits, too": "full_bf16 full_fp16",
    "the run goes on from another's state": "resume initial_step initial_epoch skip_until_initial_step",
    "captions are read from other files": "*.caption_extension=.txt caption_extension=.txt",
}


def kept(key: str) -> bool:
    """Whether a key belongs to the file of data sets."""
    return key.startswith(("general.", "datasets["))


def network_arguments(values: Values) -> dict[str, Any]:
    """The patterns and numbers in `network_args`. Raises ValueError if one is no literal."""
    found: dict[str, Any] = {}
    for name, value in named_arguments(values.get("network_args") or []).items():
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            found[name] = value
    return found


def names_module(document: Document, *beginnings: str) -> bool:
    """Whether a document's `network_module` begins so, in whatever section."""
    modules = (str(s.value) for s in document.settings if s.key.rpartition(".")[2] == "network_module")
    return any(module.startswith(beginnings) for module in modules)
