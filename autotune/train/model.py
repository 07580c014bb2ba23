"""Builds what is trained: the transformer as the settings say, and the adapter.

People train distilled models with a second adapter, which is frozen, so that training does not undo
their distillation. It is merged into the weights as they arrive, so a step costs nothing more.
Previews and validation take away what it adds, layer by layer.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.errors import AutotuneError, InvalidInput
from autotune.knobs import blocks, formats, modulation, norm_rope
from autotune.knobs.attention import ATTENTION_BACKENDS, Kernel, cuda_kernel, token_multiple
from autotune.knobs.quantized_layers import quantize_blocks, quantize_inside, torch_dtype
from autotune.machine.sources import cudnn_version
from autotune.models import noise, resolve
from autotune.models.adapter import ADAPTER_NAME, add_adapter, disable_dropout
from autotune.models.family import Batch, Family, Sample
from autotune.plan.candidate import Candidate, QuantizationError
from autotune.plan.workload import Quality, Workload
from autotune.system.files import cache_path
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.processes import shard_on_arrival
from autotune.weights import adapters, empty, files, names, stream
from autotune.weights.stream import DtypePolicy, Transform

RANDOM_SEED = 0
# One for each shape and one for all others, again for micro-batches of one and for masks.
MAX_COMPILED_GRAPHS = 32


@dataclass
class TrainingModel:
    """A transformer with an adapter, ready for `optimizer_step`."""

    family: Family
    transformer: nn.Module
    adapter: list[nn.Parameter]
    device: torch.device
    dtype: torch.dtype
    noise: noise.NoiseProcess
    # None for random weights or without quantization.
    quantization_error: QuantizationError | None = None
    token_multiple: int = 1  # masked sequences are padded to a multiple of it

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return self.family.collate(samples, self.token_multiple)


def load_model(
    model: resolve.ResolvedModel,
    workload: Workload,
    settings: Candidate,
    device: torch.device,
    seed: int,
    *,
    shards: int = 1,
    training_adapter: str | None = None,
) -> TrainingModel:
    """Load the transformer, quantized within the quality floor, with adapter and settings."""
    dtype = torch_dtype(settings.precision)
    transformer, error = load_transformer(
        model, settings, device, shards=shards, training_adapter=training_adapter
    )
    require_quality(error, workload.quality, settings.quantization)
    adapter = add_adapter(model.family, transformer, workload, dtype, seed=seed)
    blocks.swap_blocks(transformer, model.family, settings.swapped_blocks)
    loaded = TrainingModel(model.family, transformer, adapter, device, dtype, model.noise, error)
    needs = formats.WEIGHT_FORMATS[settings.quantization].needs
    compiles_products = device.type in needs.compiles_on
    if settings.compile != "off" or settings.norm_rope == "compiled" or compiles_products:
        _prepare_compiler()
    apply_settings(loaded, settings)
    return loaded


def _prepare_compiler() -> None:
    """Keep compiled code for later trials and runs of this user, and enough of it at a time."""
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
    model.token_multiple = token_multiple(find_kernel(settings, model.device, masked=True))


def find_kernel(settings: Candidate, device: torch.device, *, masked: bool) -> Kernel:
    """Name the kernel of attention that the settings run on a device."""
    if device.type != "cuda":
        return "fused"
    capability, cudnn = torch.cuda.get_device_capability(device), cudnn_version()
    how: Any = {"precision": settings.precision, "capability": capability, "cudnn": cudnn}
    return cuda_kernel(settings.attention, masked=masked, **how)


def apply_knobs(
    family: Family, transformer: nn.Module, settings: Candidate, *, needs_reload: bool
) -> None:
    """Apply either the settings that need the model loaded anew, or those that do not."""
    if needs_reload:
        quantize_blocks(transformer, family, settings.quantization)
        blocks.swap_blocks(transformer, family, settings.swapped_blocks)
        if settings.modulation == "ahead":
            modulation.take_loaded_layers(family, transformer)
        return
    whole, selective = settings.checkpointed_blocks, settings.selective_blocks
    blocks.apply_recomputation(transformer, family, whole, selective)
    kernel = find_kernel(settings, next(transformer.parameters()).device, masked=False)
    backend = ATTENTION_BACKENDS[settings.attention].diffusers_name(runs_cudnn=kernel == "cudnn")
    transformer.set_attention_backend(backend)  # type: ignore[operator]
    norm_rope.use_kernels(transformer, family.attention_layouts, settings.norm_rope)
    blocks.compile_blocks(transformer, family, settings.compile)


@contextlib.contextmanager
def eager_eval(transformer: nn.Module) -> Iterator[None]:
    """Run without dropout, training adapter, and compiled code: other shapes would take a minute to
    compile anew."""
    frozen: TrainingAdapter | None = getattr(transformer, "training_adapter", None)
    compiled = [(module, module._compiled_call_impl) for module in transformer.modules()]
    try:
        for module, _ in compiled:
            module._compiled_call_impl = None
        with (
            disable_dropout(transformer),
            frozen.off(transformer) if frozen else contextlib.nullcontext(),
        ):
            yield
    finally:
        for module, code in compiled:
            module._compiled_call_impl = code


def load_transformer(
    model: resolve.ResolvedModel,
    settings: Candidate,
    device: torch.device,
    *,
    shards: int = 1,
    training_adapter: str | None = None,
) -> tuple[nn.Module, QuantizationError | None]:
    """Stream the weights in, or random ones, quantize them, and measure the error."""
    family, dtype = model.family, torch_dtype(settings.precision)
    if device.type == "cuda":
        # TF32 for what stays in fp32, in trials and training alike.
        torch.set_float32_matmul_precision("high")
    transformer = empty.build_empty(lambda: family.build_transformer(model.config), dtype=dtype)
    frozen = training_adapter and TrainingAdapter(Path(training_adapter), transformer, family)
    policy = stream.from_pretrained_dtypes(transformer, dtype)
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
        transform = blocks.offload_on_arrival(
            family, transformer, settings.swapped_blocks, transform
        )
    if frozen:
        transform = frozen.merge_on_arrival(transform)
        transformer.training_adapter = frozen  # type: ignore[assignment]
    is_whole = device.type == "cuda" and shards == 1
    packed = family.blocks(transformer)[settings.swapped_blocks :] if is_whole else ()
    with blocks.packing(packed, transform) as transform:
        how: Any = {"device": str(device), "dtype_policy": policy, "transform": transform}
        if source is None:
            stream.fill_random(transformer, seed=RANDOM_SEED, **how)
        else:
            stream.load_into(transformer, source, loader=settings.loader, **how)
    return transformer.eval(), meter.result()


def _leave_modulation(
    family: Family,
    transformer: nn.Module,
    source: files.WeightSource | None,
    loader: str,
    device: torch.device,
    policy: DtypePolicy,
) -> files.WeightSource | None:
    """Take the modulation layers out of an empty transformer, to be read for each window."""
    if source is not None:
        stream.check_source(transformer, source)
    ahead = modulation.take_layers(family, transformer)
    layers = ahead.tensors
    own = None if source is None else source.select(layers.__contains__)

    def read_layers() -> Generator[tuple[str, Tensor]]:
        if own is None:
            for name, like in layers.items():
                drawn = stream.draw_random(name, like, device, RANDOM_SEED)
                yield name, drawn.to(policy(name, drawn.dtype))
            return
        yield from stream.stream_tensors(own, loader=loader, device=device, dtype_policy=policy)

    ahead.connect(read_layers, policy)
    return None if source is None else source.select(lambda name: name not in layers)


def save_trained(
    path: Path,
    model: TrainingModel,
    optimizer: AdapterOptimizer,
    workload: Workload,
    plan_digest: str,
    training_steps: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the adapter's fp32 masters; rsLoRA's scale becomes the alpha that any reader knows."""
    from peft.utils import get_peft_model_state_dict

    masters = dict(zip(map(id, model.adapter), optimizer.masters, strict=True))
    named = {
        name: masters[id(p)].detach().to(dtype or torch.float32)
        for name, p in model.transformer.named_parameters()
        if id(p) in masters
    }
    info = adapters.AdapterInfo(
        model=workload.model.name,
        transformer=model.family.transformer_class,
        plan_digest=plan_digest,
        rank=workload.rank,
        alpha=workload.lora_alpha * (workload.rank**0.5 if workload.adapter == "rslora" else 1),
        training_steps=training_steps,
    )
    state = get_peft_model_state_dict(model.transformer, named, adapter_name=ADAPTER_NAME)
    adapters.save_adapter(path, state, info, model.family.adapter_component)


# Of a block. Weights of 2048 x 3072 drawn from normal, Laplace and Student's t (5 degrees)
# distributions have 0.9 to 1.9% as int8 with a scale per row, 2.6% as float8 (e4m3), 9.2 to 10.4%
# as nf4 in blocks of 64: above its limit a block has outliers that the format cannot represent.
MAX_BLOCK_ERROR: Mapping[Quality, float] = {"exact": 0.0, "high": 0.05, "compact": 0.15}
NUM_INPUTS = 32


class QualityMissed(AutotuneError):
    """Quantization changes the weights by more than the quality floor allows."""


class ErrorMeter:
    """Comparison of each layer before and after a transform that quantizes it."""

    def __init__(self, repeated: Sequence[nn.Module]) -> None:
        self._block_of = {
            id(layer): number for number, block in enumerate(repeated) for layer in block.modules()
        }
        self._sums: dict[int, tuple[float, float]] = {}

    def wrap(self, transform: Transform) -> Transform:
        def measure(name: str, module: nn.Module) -> nn.Module | None:
            block = self._block_of.get(id(module))
            if block is None or not isinstance(module, nn.Linear):
                return transform(name, module)
            inputs = _inputs(module)
            before = _outputs(module, inputs)
            replacement = transform(name, module)
            if type(replacement or module) is not nn.Linear:
                self._add(block, before, _outputs(replacement or module, inputs))
            return replacement

        return measure

    def _add(self, block: int, before: torch.Tensor, after: torch.Tensor) -> None:
        error, norm = self._sums.get(block, (0.0, 0.0))
        difference = (after.double() - before.double()).square().sum().item()
        self._sums[block] = error + difference, norm + before.double().square().sum().item()

    def result(self) -> QuantizationError | None:
        """Return the error of all blocks and of the worst; None if nothing was quantized."""
        if not self._sums:
            return None
        errors = {block: _ratio(*sums) for block, sums in self._sums.items()}
        worst = max(errors, key=lambda block: errors[block])
        total = _ratio(*(sum(column) for column in zip(*self._sums.values(), strict=True)))
        return QuantizationError(overall=total, worst=errors[worst], worst_block=worst)


def require_quality(error: QuantizationError | None, quality: Quality, quantization: str) -> None:
    """Raise QualityMissed if the error of a block is above the quality floor's limit."""
    if error is not None and error.worst > MAX_BLOCK_ERROR[quality]:
        block = f"block {error.worst_block} of this model is {error.worst:.1%} off its real outputs"
        allowed = f"--quality {quality} allows {MAX_BLOCK_ERROR[quality]:.0%}"
        hint = f"make the plan again with --exclude quantization={quantization}"
        raise QualityMissed(f"quantized as {quantization}, {block}; {allowed}", hint=hint)


def _ratio(squared_error: float, squared_norm: float) -> float:
    error = (squared_error / squared_norm) ** 0.5 if squared_norm > 0 else float(squared_error > 0)
    return error if error < 1 else 1.0  # NaN too


def _inputs(layer: nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer.in_features)
    return torch.randn(NUM_INPUTS, layer.in_features, generator=generator).to(layer.weight)


@torch.no_grad()
def _outputs(layer: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = layer(inputs)
    bias = layer.bias
    return outputs.float() if bias is None else outputs.float() - bias.float()  # type: ignore[operator]


class FrozenLayer(NamedTuple):
    """An addition to a Linear layer: `scale * up @ down`, in fp32 on the host."""

    down: Tensor
    up: Tensor
    scale: float


class TrainingAdapter:
    """A frozen adapter's layers, by name: on in training, off in all that comes of it."""

    def __init__(self, path: Path, transformer: nn.Module, family: Family) -> None:
        """Read the file; `transformer` may be on meta.

        Raises BadWeights, or InvalidInput if the file is no LoRA of this model's Linear layers.
        """
        modules = dict(transformer.named_modules())
        adapter = adapters.read_adapter(path, modules, family.transformer_class)
        adapters.require_layers(path, adapter, modules)
        self.is_off = False
        self.layers: dict[str, FrozenLayer] = {}
        for name, layer in adapter.layers.items():
            is_plain = isinstance(modules[name], nn.Linear) and layer.magnitude is None
            if not isinstance(layer, names.LoraLayer) or not is_plain:
                message = f"what {path} has for {name} is no LoRA of a Linear layer"
                raise InvalidInput(message, hint="a training adapter is a LoRA of Linear layers")
            scale = layer.alpha / layer.rank
            self.layers[name] = FrozenLayer(layer.down.float(), layer.up.float(), scale)

    def require_with(
        self, settings: Candidate, workload: Workload, transformer: nn.Module, family: Family
    ) -> None:
        """Raise InvalidInput if a plan computes ahead what this adapts, or learns norms of weights.

        `transformer` is the whole one, perhaps on meta.
        """
        if settings.modulation == "ahead" and family.modulation is not None:
            ahead = {name for _, name in family.modulation.find(transformer)}
            if both := self.layers.keys() & ahead:
                what = f"the training adapter is for {min(both)}, which this plan computes ahead"
                raise InvalidInput(what, hint="plan again with --exclude modulation=ahead")
        if workload.adapter == "dora":
            what = "DoRA learns norms of weights that a training adapter changes"
            raise InvalidInput(what, hint="plan again with --adapter lora")

    def merge_on_arrival(self, then: Transform | None) -> Transform:
        """Make a transform of modules as they arrive: merge, then what else is to be done."""

        def on_arrival(name: str, module: nn.Module) -> nn.Module | None:
            if name in self.layers:
                down, up, scale = self.layers[name]
                weight: Any = module.weight
                added = (up.to(weight.device) @ down.to(weight.device)) * scale
                weight.data = (weight.float() + added).to(weight.dtype)
            return then(name, module) if then else None

        return on_arrival

    @contextlib.contextmanager
    def off(self, transformer: nn.Module) -> Iterator[None]:
        """Take away what the adapter adds, up to the rounding of merging it."""
        if self.is_off:
            yield
            return
        modules = dict(transformer.named_modules())
        with contextlib.ExitStack() as stack:
            for name, layer in self.layers.items():
                # Under the adapter that is trained, if this layer has one.
                module: Any = modules.get(f"{name}.base_layer", modules[name])
                stack.callback(module.register_forward_hook(_subtract(layer)).remove)
            self.is_off = True
            stack.callback(setattr, self, "is_off", False)
            yield


def _subtract(layer: FrozenLayer) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    held: list[Tensor] = []  # on the device until the hook is removed

    def hook(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        x = inputs[0]
        if not held:
            held.extend(each.to(x.device, x.dtype) for each in (layer.down, layer.up))
        down, up = held
        return output - torch.nn.functional.linear(x @ down.t(), up) * layer.scale

    return hook
