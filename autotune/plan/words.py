"""Words that people read for a plan's names, as the trainers that they know have them.

The names themselves are what `--pin` and the plan's file take.
"""

from collections.abc import Iterable, Mapping

from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, Choice

TITLES: Mapping[str, str] = {
    "micro_batch_size": "batch size",
    "checkpointed_blocks": "gradient checkpointing",
    "selective_blocks": "gradient checkpointing (attention kept)",
    "swapped_blocks": "block swap",
    "quantization": "base model",
    "attention": "attention",
    "modulation": "modulation",
    "norm_rope": "norm and RoPE",
    "compile": "torch.compile",
    "precision": "precision",
    "optimizer": "optimizer",
    "loader": "loader",
    "allocator": "allocator",
    "data_workers": "data workers",
    "batch_memory": "batch memory",
    "caching": "text encoder",
}
"""Titles of a candidate's fields, and of the settings of encoding."""
FORMATS: Mapping[Choice, str] = {
    "none": "not quantized",
    "torchao-int8": "in int8",
    "torchao-fp8": "in fp8",
    "int8-matmul": "in int8, computed in int8",
    "fp8-matmul": "in fp8, computed in fp8",
    "bnb-nf4": "in NF4",
}
VALUES: Mapping[str, Mapping[Choice, str]] = {
    **{name: {0: "off"} for name in BLOCK_COUNTS},
    "quantization": FORMATS,
    "attention": {
        "native": "PyTorch's choice",
        "_native_flash": "flash (PyTorch)",
        "_native_efficient": "memory-efficient (PyTorch)",
        "_native_cudnn": "cuDNN (PyTorch)",
        "_native_math": "plain products (PyTorch)",
        "flash": "flash-attn 2",
        "flash-3": "flash-attn 3",
        "flash-4": "flash-attn 4",
    },
    "modulation": {"resident": "in the model", "ahead": "computed ahead"},
    "norm_rope": {"stock": "as in diffusers"},
    "compile": {"block": "each block"},
    "allocator": {"expandable": "of expandable segments"},
    "data_workers": {0: "none"},
    "batch_memory": {"pinned": "pinned"},
}
"""Words for values that are not their names. No two values of a knob share theirs."""
PLAIN: Mapping[str, Choice] = {**dict.fromkeys(BLOCK_COUNTS, 0), "quantization": "none"}
"""Values that save no memory."""
UNTOLD = ("allocator", "data_workers", "batch_memory")
"""Knobs that no two candidates are compared for."""
MAIN = ("quantization", *BLOCK_COUNTS, "attention", "compile", "precision")
"""Settings that other trainers have, too, in the order in which they are told."""
PHASES = {
    "load": "loading",
    "cache": "caching",
    "train": "training",
    "preview": "previews",
    "save": "saving",
}
"""Phases of a prediction by the names that rehearsals have."""
PARTS = {
    "weight": "base model",
    "adapter": "adapter",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "saved_activation": "activations",
    "transient": "temporary",
    "attention_workspace": "attention",
    "process_overhead": "process and libraries",
    "allocator_rounding": "lost to rounding",
    "matmul": "base model",
    "attention": "attention",
    "elementwise": "norms and activations",
    "dequantization": "converting weights",
    "convolution": "convolutions",
    "overhead": "starting operations",
    "transfer": "block swap",
    "recompute": "of it recomputing",
}
"""Parts of predicted memory and time."""
OUTCOMES = {
    "ok": "ran",
    "oom": "ran out of memory",
    "host_oom": "ran out of system RAM",
    "spill": "spilled into system RAM",
    "timeout": "took too long",
    "unsupported": "is not supported here",
    "numerics": "computed wrong numbers",
    "crash": "crashed",
    "unpaid": "takes longer to start than it saves",
    "disturbed": "was slowed down by other programs",
}
MEMORY = {"cuda": "VRAM", "mps": "unified memory", "cpu": "system RAM"}
"""The memory that training takes, by kind of device."""


def value_text(name: str, value: Choice, num_blocks: int | None = None) -> str:
    """Put a knob's value in words, to follow its title: `59 of 60 blocks`, or `in int8`."""
    if name in BLOCK_COUNTS and isinstance(value, int) and value:
        of = f" of {num_blocks}" if num_blocks is not None else ""
        return f"{value}{of} block{'s' * ((num_blocks or value) > 1)}"
    return VALUES.get(name, {}).get(value, str(value))


def setting_text(name: str, value: Choice, num_blocks: int | None = None) -> str:
    """Put a setting in words: `block swap 12 of 60 blocks`, or `base model in int8`."""
    return f"{TITLES.get(name, name)} {value_text(name, value, num_blocks)}"


def unusual_settings(
    candidate: Candidate, names: Iterable[str] = TITLES, num_blocks: int | None = None
) -> list[str]:
    """Put the settings of these knobs in words that are not the plain ones."""
    plain = Candidate(micro_batch_size=candidate.micro_batch_size, checkpointed_blocks=0)
    unusual = candidate.differences(plain)
    return [setting_text(name, unusual[name], num_blocks) for name in names if name in unusual]


def label_of(candidate: Candidate) -> str:
    """Put a candidate in one line, without what hardly decides speed or memory."""
    told = (name for name in TITLES if name not in UNTOLD)
    return ", ".join(
        (f"batch size {candidate.micro_batch_size}", *unusual_settings(candidate, told))
    )


def caching_text(caching: CachingSettings) -> str:
    """Put the settings of encoding in words, to follow their title."""
    stored = caching.text_encoder_quantization
    stored = "streamed" if caching.text_encoder_streamed else FORMATS.get(stored, stored)
    parts = [f"{stored}{_place(caching.text_encoder_device)}"]
    if caching.vae_device != "training":
        parts.append(f"VAE{_place(caching.vae_device)}")
    return ", ".join([*parts, *["kept"] * (caching.residency == "keep")])


def _place(device: str) -> str:
    return "" if device == "training" else f" on {device}"
