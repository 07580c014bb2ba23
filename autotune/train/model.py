"""Builds what is trained: the transformer with its frozen weights as the settings say, and the
adapter."""

import contextlib
import os
import platform
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autotune.knobs.attention import ATTENTION_BACKENDS, cuda_kernel, token_multiple
from autotune.knobs.block_swap import offload_on_arrival, swap_blocks
from autotune.knobs.checkpointing import apply_recomputation
from autotune.knobs.compile import compile_blocks
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.modulation import take_layers, take_loaded_layers
from autotune.knobs.norm_rope import use_kernels
from autotune.knobs.quantized_layers import quantize_blocks, quantize_inside, torch_dtype
from autotune.machine.sources import cudnn_version
from autotune.models.adapter import add_adapter, disable_dropout
from autotune.models.family import Batch, Family, Sample
from autotune.models.noise import NoiseProcess
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import Candidate
from autotune.plan.trial import QuantizationError
from autotune.plan.workload import Workload
from autotune.system.files import cache_path
from autotune.train.quality import ErrorMeter, require_quality
from autotune.train.sharding import shard_on_arrival
from autotune.weights.files import WeightSource
from autotune.weights.stream import (
    DtypePolicy,
    Transform,
    build_empty,
    check_source,
    draw_random,
    fill_random,
    from_pretrained_dtypes,
    load_into,
    stream_tensors,
)

RANDOM_SEED = 0
"""Seed of weights for which there are no files."""
MAX_COMPILED_GRAPHS = 32
"""Code is compiled for one shape and for all others, and again for micro-batches of one and for
those with a mask."""


@dataclass
class TrainingModel:
    """A transformer with an adapter, ready for `optimizer_step`."""

    family: Family
    transformer: nn.Module
    adapter: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    noise: NoiseProcess
    quantization_error: QuantizationError | None = None
    """Error of quantizing the weights; None for random weights or without quantization."""
    token_multiple: int = 1
    """What masked sequences are padded to a multiple of, with the settings in use."""

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """A batch as the settings in use want it."""
        return self.family.collate(samples, self.token_multiple)


def load_model(
    model: ResolvedModel,
    workload: Workload,
    settings: Candidate,
    device: torch.device,
    seed: int,
    *,
    shards: int = 1,
) -> TrainingModel:
    """Load the transformer, quantize it, add the adapter, and apply all other settings.

    Frozen weights are sharded over `shards` processes.

    Raises:
        BadWeights: files are missing, damaged or of another model.
        QualityMissed: quantization changes the weights by more than the workload's quality floor
            allows.
    """
    dtype = torch_dtype(settings.precision)
    transformer, error = load_transformer(model, settings, device, shards=shards)
    require_quality(error, workload.quality, settings.quantization)
    adapter = add_adapter(model.family, transformer, workload, dtype, seed=seed)
    swap_blocks(transformer, model.family, settings.swapped_blocks)
    loaded = TrainingModel(model.family, transformer, adapter, device, dtype, model.noise, error)
    compiles_products = device.type in WEIGHT_FORMATS[settings.quantization].needs.compiles_on
    if settings.compile != "off" or settings.norm_rope == "compiled" or compiles_products:
        _prepare_compiler()
    apply_settings(loaded, settings)
    return loaded


def _prepare_compiler() -> None:
    """Let what is compiled be kept for later trials and runs of this user, and enough of it at a
    time."""
    import torch._dynamo.config as dynamo

    versions = f"torch-{torch.__version__}-python-{platform.python_version()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_path("compiled", versions)))
    # Beyond its limit of eight graphs torch runs code uncompiled, and only logs it. The default is
    # changed: from torch 2.12 on a thread sees no other's settings, and on CUDA backward passes run
    # in threads of their own.
    limit = vars(dynamo)["_config"]["recompile_limit"]
    limit.default = max(limit.default, MAX_COMPILED_GRAPHS)


def apply_settings(model: TrainingModel, settings: Candidate) -> None:
    """Apply the settings that need no reload; may be called again with others."""
    apply_knobs(model.family, model.transformer, settings, needs_reload=False)
    model.token_multiple = find_token_multiple(settings, model.device)


def find_token_multiple(settings: Candidate, device: torch.device) -> int:
    """What masked sequences are padded to a multiple of, by the attention kernel that the
    settings run there."""
    if device.type != "cuda":
        return 1
    capability, cudnn, how = (
        torch.cuda.get_device_capability(device),
        cudnn_version(),
        settings.precision,
    )
    return token_multiple(
        cuda_kernel(
            settings.attention, masked=True, precision=how, capability=capability, cudnn=cudnn
        )
    )


def apply_knobs(
    family: Family, transformer: nn.Module, settings: Candidate, *, needs_reload: bool
) -> None:
    """Apply one half of the settings: those that need the model loaded anew, or those that do
    not."""
    if needs_reload:
        quantize_blocks(transformer, family, settings.quantization)
        swap_blocks(transformer, family, settings.swapped_blocks)
        if settings.modulation == "ahead":
            take_loaded_layers(family, transformer)
        return
    whole, selective = settings.checkpointed_blocks, settings.selective_blocks
    apply_recomputation(transformer, family, whole, selective)
    transformer.set_attention_backend(ATTENTION_BACKENDS[settings.attention].diffusers_name())  # type: ignore[operator]
    use_kernels(transformer, family.attention_layouts, settings.norm_rope)
    compile_blocks(transformer, family, settings.compile)


@contextlib.contextmanager
def eager_eval(transformer: nn.Module) -> Iterator[None]:
    """Run without dropout and without compiled code, for samples and evaluations. Code is
    compiled for training steps, and any other call would take a minute to compile anew."""
    compiled = [(module, module._compiled_call_impl) for module in transformer.modules()]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        with disable_dropout(transformer):
            yield
    finally:
        for module, code in compiled:
            module._compiled_call_impl = code


def load_transformer(
    model: ResolvedModel, settings: Candidate, device: torch.device, *, shards: int = 1
) -> tuple[nn.Module, QuantizationError | None]:
    """Stream the weights in and quantize each layer as it loads, so that loading hardly needs more
    memory than the result.

    Without files the architecture gets random weights, enough for a trial, which measures memory
    and time. With files, the error of quantization is measured and returned.
    """
    family, dtype = model.family, torch_dtype(settings.precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(
            "high"
        )  # TF32 for what stays in fp32, in trials and training alike
    transformer = build_empty(lambda: family.build_transformer(model.config), dtype=dtype)
    policy = from_pretrained_dtypes(transformer, dtype)
    source = None if model.folder is None else model.open_transformer()
    if settings.modulation == "ahead":
        source = _leave_modulation(family, transformer, source, settings.loader, device, policy)
    if shards > 1:
        transform: Transform | None = shard_on_arrival(family, transformer, device.type)
    else:
        transform = quantize_inside(family.blocks(transformer), settings.quantization)
    meter = ErrorMeter(family.blocks(transformer))
    if transform and settings.quantization != "none" and model.folder is not None:
        transform = meter.wrap(transform)
    if settings.swapped_blocks:  # after the error is measured on the device
        transform = offload_on_arrival(family, transformer, settings.swapped_blocks, transform)
    if source is None:
        fill_random(
            transformer,
            device=str(device),
            seed=RANDOM_SEED,
            dtype_policy=policy,
            transform=transform,
        )
        return transformer.eval(), None
    load_into(
        transformer,
        source,
        loader=settings.loader,
        device=str(device),
        dtype_policy=policy,
        transform=transform,
    )
    return transformer.eval(), meter.result()


def _leave_modulation(
    family: Family,
    transformer: nn.Module,
    source: WeightSource | None,
    loader: str,
    device: torch.device,
    policy: DtypePolicy,
) -> WeightSource | None:
    """Let the modulation layers leave an empty transformer, after a check of all its files'
    headers.

    Returns the files of what is left; the layers' own are read from `source` whenever a window
    needs them, or are as random as without files.
    """
    if source is not None:
        check_source(transformer, source)
    ahead = take_layers(family, transformer)
    layers = ahead.tensors
    own = None if source is None else source.select(layers.__contains__)

    def stream() -> Generator[tuple[str, Tensor]]:
        if own is None:
            for name, like in layers.items():
                drawn = draw_random(name, like, device, RANDOM_SEED)
                yield name, drawn.to(policy(name, drawn.dtype))
            return
        yield from stream_tensors(own, loader=loader, device=device, dtype_policy=policy)

    ahead.connect(stream, policy)
    return None if source is None else source.select(lambda name: name not in layers)
