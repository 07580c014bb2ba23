"""What musubi-tuner and sd-scripts have in common: names of options, files of options and of
data sets.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autotune.families import Family
from autotune.trainers import blocks, rules
from autotune.trainers.document import Document
from autotune.trainers.layers import Selects, in_block, layers_of, linear_layers, original_name
from autotune.trainers.meanings import meanings
from autotune.trainers.rules import LOST, Context, Rule, Values, number, whole
from autotune.trainers.tables import ALLOCATOR, choice, precision

SHIFTS_BY_RESOLUTION = ("flux_shift", "qwen_shift", "flux2_shift", "krea2_shift")


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
    return {"flux1-dev": "flux_shift", "krea-2": "krea2_shift"}.get(family.name, "qwen_shift")


def _resolution(values: Values, context: Context) -> Values:
    written = next(values[key] for key in RESOLUTIONS if values.get(key) is not None)
    parts = (
        str(written).split(",")
        if isinstance(written, str)
        else written
        if isinstance(written, list)
        else [written]
    )
    sides = [whole(part) for part in parts]
    return {"resolution": sides[0] if len(set(sides)) == 1 else (sides[0], sides[-1])}


RESOLUTIONS = ("datasets[].resolution", "general.resolution", "resolution")
BATCHES = ("datasets[].batch_size", "general.batch_size", "train_batch_size")
NOISE = Rule(
    ("timestep_sampling", "discrete_flow_shift", "sigmoid_scale"),
    ("timestep_sampling", "timestep_shift"),
    _noise,
    _write_noise,
)
RULES: tuple[Rule, ...] = (
    Rule(
        RESOLUTIONS,
        ("resolution",),
        _resolution,
        lambda ours, _: {"general.resolution": [ours["resolution"], ours["resolution"]]},
        synonyms=RESOLUTIONS,
    ),
    rules.batch(
        BATCHES, "gradient_accumulation_steps", "launch.num_processes", written="general.batch_size"
    ),
    rules.duration("max_train_steps", "max_train_epochs", epochs_win=True),
    rules.schedule(
        "lr_scheduler", "lr_warmup_steps", "constant constant_with_warmup linear cosine"
    ),
    rules.weight_decay_among("optimizer_args", as_list=True),
    choice(
        "optimizer_type",
        "optimizer",
        {"AdamW": "adamw"},
        instead="trains with AdamW in full precision",
    ),
    choice(
        "weighting_scheme",
        "weighting_scheme",
        {"none": "none", "sigma_sqrt": "sigma_sqrt", "cosmap": "cosmap"},
    ),
    blocks.checkpointing("gradient_checkpointing"),
    precision("mixed_precision", bf16="bf16", fp32="no", fp16="fp16"),
    ALLOCATOR,
    *rules.equal(
        """
        rank=network_dim lora_alpha=network_alpha lora_dropout=network_dropout learning_rate=learning_rate|unet_lr
        max_grad_norm=max_grad_norm seed=seed checkpointing_steps=save_every_n_steps preview_every=sample_every_n_steps
        data_workers=max_data_loader_n_workers
        """
    ),
)
DECIDED = meanings(
    """
    buckets: *.enable_bucket *.bucket_no_upscale enable_bucket bucket_no_upscale *.min_bucket_reso *.max_bucket_reso
        *.bucket_reso_steps min_bucket_reso max_bucket_reso bucket_reso_steps
    repeats: *.num_repeats num_repeats
    cached: *.cache_directory cache_latents cache_latents_to_disk cache_text_encoder_outputs
        cache_text_encoder_outputs_to_disk vae_batch_size skip_cache_check
    weights are read from a folder in the diffusers layout: dit vae text_encoder* t5 ae clip_l t5xxl vae_dtype
    what is copied ahead, and how files are read, is measured: use_pinned_memory_for_block_swap block_swap_*
        disable_numpy_memmap disable_mmap_load_safetensors persistent_data_loader_workers
    named: output_dir output_name logging_dir log_* save_* metadata_* training_comment wandb_* no_metadata huggingface_*
        script launch.*
    previews: sample_*
    """
)
UNLEARNED = meanings(
    """
    schedule: lr_decay_steps lr_scheduler_num_cycles=1 lr_scheduler_power=1 lr_scheduler_timescale
        lr_scheduler_min_lr_ratio lr_scheduler_type lr_scheduler_args
    merged: network_weights dim_from_weights base_weights*
    the size of the adapter's weights is limited: scale_weight_norms
    noise: min_timestep max_timestep preserve_distribution_shape num_timestep_buckets logit_mean logit_std=1.0
        mode_scale noise_offset* multires_noise_iterations adaptive_noise_scale ip_noise_gamma*
    gradients: full_bf16 full_fp16
    the run goes on from another's state: resume initial_step initial_epoch skip_until_initial_step
    files: *.caption_extension=.txt caption_extension=.txt
    """
)


def kept(key: str) -> bool:
    """Whether a key belongs to the file of data sets."""
    return key.startswith(("general.", "datasets["))


def network_arguments(values: Values) -> dict[str, Any]:
    """The patterns and numbers in `network_args`. Raises ValueError if one is no literal."""
    found: dict[str, Any] = {}
    for name, value in rules.named_arguments(values.get("network_args") or []).items():
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            found[name] = value
    return found


def network_targets(
    known: tuple[str, ...],
    selects: Callable[[Values, Context], Selects],
    write: Callable[[Values, Context], Values],
) -> Rule:
    """The adapted layers by `network_args`, of which the `known` are understood."""
    rule = rules.targets(["network_args"], selects, write, in_blocks=False)

    def read(values: Values, context: Context) -> Values:
        found = dict(rule.read(values, context))
        others = [name for name in network_arguments(values) if name not in known]
        lost = [
            found.get(LOST),
            f"{', '.join(others)}: autotune has no such argument" if others else None,
        ]
        told = "; ".join(filter(None, lost))
        return {**found, **({LOST: told} if told else {})}

    return replace(rule, read=read)


def patterns(usual: Callable[[Family], tuple[str, str]], everywhere: tuple[str, ...]) -> Rule:
    """The adapted layers by patterns: excluded by any and included by none is left out (musubi's
    networks/lora.py, `create_modules`).

    Args:
        usual: what a family always excludes, and what it includes unless the file says otherwise.
        everywhere: families of which layers outside the blocks are adapted, too.
    """

    def any_of(given: list[str], name: str) -> bool:
        return any(re.fullmatch(str(pattern), name) for pattern in given)

    def selects(values: Values, context: Context) -> Selects:
        given = network_arguments(values)
        exclude, include = usual(context.family)
        excluded = [exclude, *given.get("exclude_patterns", ())]
        included = given.get("include_patterns", [include])
        layers = linear_layers(context.family, in_blocks=context.family.name not in everywhere)
        names = {layer: original_name(context.family, layer) for layer in layers}
        return lambda layer: (
            layer in names
            and (not any_of(excluded, names[layer]) or any_of(included, names[layer]))
        )

    def write(ours: Values, context: Context) -> Values:
        wanted = layers_of(context.family, ours["targets"])
        names = {
            layer: original_name(context.family, layer) for layer in linear_layers(context.family)
        }
        others = {name for layer, name in names.items() if layer not in wanted}
        found = set()
        for name in (names[layer] for layer in wanted):
            end = r".*\." + re.escape(in_block(name))
            exact = re.escape(name).replace(r"\.0\.", r"\.\d+\.", 1)
            found.add(exact if any(re.fullmatch(end, other) for other in others) else end)
        included = "', r'".join(sorted(found))
        return {"network_args": ["exclude_patterns=[r'.*']", f"include_patterns=[r'{included}']"]}

    return network_targets(("exclude_patterns", "include_patterns"), selects, write)


def modules_of(document: Document) -> tuple[str, ...]:
    """The values of a document's `network_module`, in whatever section."""
    found = (s for s in document.settings if s.key.rpartition(".")[2] == "network_module")
    return tuple(str(setting.value) for setting in found)
