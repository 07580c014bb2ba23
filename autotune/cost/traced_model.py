"""The traced side of a prediction: what depends on the model and the workload alone."""

import contextlib
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cache, partial, wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import diffusers
import torch
from torch import nn

from autotune.cost import recorder, trace
from autotune.cost.allocator import holes_of
from autotune.cost.kernels import DeviceRules, kernel_for, quantize_for_tracing, substitutes
from autotune.errors import AutotuneError, InvalidInput, first_line, is_out_of_memory
from autotune.knobs.attention import token_multiple
from autotune.knobs.blocks import apply_recomputation, region_offsets
from autotune.knobs.modulation import ModulationAhead, find_modulation_ahead, take_layers
from autotune.knobs.norm_rope import use_kernels
from autotune.knobs.quantized_layers import torch_dtype
from autotune.knobs.settings import encoder_precision
from autotune.models.adapter import add_adapter, block_numbers
from autotune.models.facts import Parts
from autotune.models.family import PRIOR, TORCH_LOCK, Batch, Family, build_on_meta
from autotune.plan.prediction import AdapterPractice, Overheads
from autotune.plan.workload import ADAMW, Bucket, Workload
from autotune.weights.stream import attribute_tensors, cast_as_loaded, from_pretrained_dtypes

# Mix a decoded tile's margin into its neighbor's, row by row: thousands of operations.
BLENDS = {"blend_v", "blend_h", "blend_t"}
# What classes raise that are built from a configuration that nobody published.
MISTAKES = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
FILE_BYTES = 10 * 10**9  # diffusers writes larger models into several
VISITING_BLOCKS = 2  # swapped blocks on the device at once: the one that runs and the next
PIPE_BYTES = 1 << 20  # as much as Linux gives: in a small one a trace would wait to be fetched
NUM_REMEMBERED = 4  # traced models that are kept for whoever asks for the same again
P = ParamSpec("P")
T = TypeVar("T")


class PassChoice(NamedTuple):
    """Values of a candidate that decide which passes are traced."""

    precision: str
    quantization: str
    attention: str
    micro_batch_size: int
    modulation: str
    norm_rope: str


@dataclass(frozen=True)
class ModulationBytes:
    """The modulation layers of a model that does not hold them."""

    weight_bytes: int  # fetched for every window
    row_bytes: int  # what they make of one draw
    shapes: tuple[tuple[int, int], ...]  # (input, output) features of each
    largest_layer_bytes: int


@dataclass(frozen=True)
class ModelBytes:
    """Bytes that the full model keeps, for one precision and quantization."""

    weight_bytes: int
    buffer_bytes: int  # buffers, and tensors that modules keep as plain attributes
    adapter_bytes: int
    adapter_parameters: int
    adapter_shapes: Mapping[tuple[int, ...], int]  # how many of its tensors have each shape
    block_adapter_bytes: tuple[int, ...]  # of each block, in the order they run
    block_weight_bytes: tuple[int, ...]
    block_pinned_bytes: tuple[int, ...]  # what frozen weights take of the host's memory if swapped
    outside_bytes: int  # of the weights that no block holds
    # A region, while its block's weights are there, too: of the last that arrives, less what
    # follows it in its file.
    packing_bytes: int
    largest_block_bytes: int  # before quantization
    largest_layer_bytes: int  # before quantization
    modulation: ModulationBytes | None  # if its layers are not among the weights

    def swapped_bytes(self, swapped: int) -> tuple[int, int]:
        """Return the frozen weights of swapped blocks, and the most that visit the device."""
        blocks = self.block_weight_bytes[:swapped]
        return sum(blocks), sum(sorted(blocks)[-VISITING_BLOCKS:])


@dataclass(frozen=True)
class VaeCost:
    """Bytes of the autoencoder; what it takes for one item, and what the allocator leaves free."""

    weight_bytes: int
    encode_bytes: tuple[int, int]
    whole_decode_bytes: tuple[int, int]
    tiled_decode_bytes: tuple[int, int]  # where it can: previews do so where memory is short
    encode_bytes_moved: int  # by the operations that encode one item: convolutions wait for memory
    encode_flops: int  # which a CPU waits for


def one_at_a_time(function: Callable[P, T], *shared_as: Hashable) -> Callable[P, T]:
    """Return `function`, called once for each argument, by one thread at a time. A shared function
    takes results that a second process (`working_ahead`) has found already."""
    known: dict[Hashable, T] = {}

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        key = shared_as, arguments, tuple(options.items())
        with TORCH_LOCK:
            if key not in known:
                found = _second.receive() if shared_as else {}
                known[key] = found.pop(key) if key in found else function(*arguments, **options)
                if shared_as:
                    _second.send(key, known[key])
            return known[key]

    return call


class _SecondProcess:
    """A fork that traces, too, and tells what it finds: seen from either side."""

    def __init__(self) -> None:
        self.start: Callable[[], None] | None = None  # for when something is to be traced
        self.incoming: Connection | None = None
        self.outgoing: Connection | None = None
        self.found: dict[Hashable, Any] = {}

    def receive(self) -> dict[Hashable, Any]:
        start, self.start = self.start, None
        with contextlib.suppress(EOFError, OSError):
            if start:
                start()
            while self.incoming and self.incoming.poll():
                self.found.update([self.incoming.recv()])
        return self.found

    def send(self, key: Hashable, value: object) -> None:
        if self.outgoing:
            self.outgoing.send((key, value))


_second = _SecondProcess()


@contextmanager
def working_ahead(tasks: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Let a second core trace what the tasks need, from the last on, while this process begins at
    the first. Whatever happens there, it only takes longer."""
    child = 0

    def start() -> None:
        import fcntl  # which Windows lacks

        nonlocal child
        _second.found = {}
        receiving, sending = Pipe(duplex=False)
        fcntl.fcntl(sending, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        child = os.fork()
        if child:
            sending.close()
            _second.incoming = receiving
            return
        try:
            _second.incoming, _second.outgoing = None, sending
            for task in reversed(tasks):
                with contextlib.suppress(AutotuneError):
                    task()
        finally:
            os._exit(0)

    alone = sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2
    if alone or threading.active_count() > 1 or _second.incoming or _second.outgoing:
        yield
        return
    _second.start = start
    try:
        yield
    finally:
        _second.start = None
        _second.receive()
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if _second.incoming:
            _second.incoming.close()
        _second.incoming = None


_remembered: dict[tuple[str, str], "TracedModel"] = {}


def traced_model(
    family: Family,
    config: Mapping[str, Any],
    workload: Workload,
    rules: DeviceRules,
    parts: Parts,
    overheads: Overheads | None = None,
) -> "TracedModel":
    """Return a `TracedModel` that shares what was traced lately with equal shapes."""
    shapes = workload.changed(quality="high", effective_batch_size=1, optimizer=ADAMW)
    of_vae = family, sorted(config.items()), rules, parts, workload.largest_bucket
    key = repr(of_vae), repr((shapes, overheads and overheads.traced))
    with TORCH_LOCK:
        model = _remembered.pop(key, None)
        if model is None:
            model = TracedModel(family, config, workload, rules, parts, overheads, key)
            alike = (each for own, each in _remembered.items() if own[0] == key[0])
            model.vae_cost = next(alike, model).vae_cost
        while len(_remembered) >= NUM_REMEMBERED:
            del _remembered[next(iter(_remembered))]
        _remembered[key] = model  # at the end: the first is the one that was asked for longest ago
    if model.workload != workload:
        model = copy(model)
        model.workload = workload
    return model


@dataclass(eq=False)
class TracedModel:
    """One family's transformer under one workload. Nothing is traced twice."""

    family: Family
    config: Mapping[str, Any]
    workload: Workload
    rules: DeviceRules
    parts: Parts
    overheads: Overheads | None  # of the program that trains; None for autotune's executor
    key: tuple[str, str]  # equal for equal costs of the VAE, and for equal traces

    def __post_init__(self) -> None:
        family, workload = self.family, self.workload
        self._resident = build_on_meta(family, self.config)
        kinds = trace.block_kinds(family, self._resident)
        self.num_blocks = sum(map(len, kinds))  # of the full model
        adapted = block_numbers(workload.adapted_blocks, self.num_blocks)
        # Blocks of each list that are traced; for each of the full model, which stands for it.
        self.picked, self.index, adapted_traced = trace.choose_traced(kinds, adapted)
        self._traced_blocks = "all" if adapted is None else ",".join(map(str, adapted_traced))
        trace.shorten(family, self._resident, self.picked)
        self._template = cache(self._build_template)
        self.model = one_at_a_time(self._model)
        self.traced = one_at_a_time(self._traced, "traced", self.key)
        self.model_bytes = one_at_a_time(self._model_bytes, "bytes", self.key)
        self.vae_cost = one_at_a_time(self._vae_cost, "vae", self.key[0])
        self.in_shape = cache(self._in_shape)

    def _build_template(self, modulation: str) -> Any:
        if modulation != "ahead":
            return self._resident
        transformer = build_on_meta(self.family, self.config)
        take_layers(self.family, transformer)
        trace.shorten(self.family, transformer, self.picked)
        return transformer

    def _in_shape(self, bucket: Bucket, text_tokens: int) -> "TracedModel":
        if (bucket, text_tokens) == (self.workload.largest_bucket, self.workload.max_text_tokens):
            return self
        other, changes = copy(self), {"max_text_tokens": text_tokens, "text_token_quantiles": ()}
        other.workload = self.workload.changed(buckets=(bucket,), **changes)
        other.model = one_at_a_time(other._model)
        other.traced = one_at_a_time(other._traced, "traced", self.key, bucket, text_tokens)
        return other

    @contextmanager
    def _running_configuration(self) -> Iterator[None]:
        """Raise InvalidInput if what an unpublished model runs alone, untouched, fails."""
        try:
            yield
        except MISTAKES as error:
            published = (dict(self.family.transformer_config), self.family.parts)
            if is_out_of_memory(error) or (dict(self.config), self.parts) == published:
                raise
            why = first_line(error) or type(error).__name__
            what = f"a model of this configuration does not run: {why}"
            hint = "compare config.json in transformer/ and vae/ with the published ones"
            raise InvalidInput(what, hint=hint) from error

    def with_overheads(self, overheads: Overheads | None) -> "TracedModel":
        if overheads == self.overheads:
            return self
        known = self.family, self.config, self.workload, self.rules, self.parts
        return traced_model(*known, overheads)

    def masked(self, micro_batch_size: int) -> bool:
        """Tell if attention gets a mask because captions differ in length."""
        has_mask, padding = self.family.has_attention_mask, self.workload.text_padding
        return not has_mask(1, "exact") and has_mask(micro_batch_size, padding)

    def image_tokens(self, bucket: Bucket) -> int:
        """Return the tokens that an image or a clip becomes, its control images included."""
        frames = self.family.num_latent_frames(bucket.num_frames) + self.workload.num_control_images
        return self.family.tokens_per_frame(bucket) * frames

    def _model(self, precision: str, quantization: str, modulation: str = "resident") -> nn.Module:
        transformer, dtype = deepcopy(self._template(modulation)), torch_dtype(precision)
        cast_as_loaded(transformer, dtype)
        if ahead := find_modulation_ahead(transformer):
            ahead.set_dtype(from_pretrained_dtypes(transformer, dtype))
        with recorder.Remembering():  # type: ignore[no-untyped-call]
            self._fill_caches(transformer, dtype)
            products = self.overheads.products.get(quantization) if self.overheads else None
            quantize_for_tracing(self.family, transformer, quantization, self.rules, products)
            practice = self._practice(quantization)
            work = self.workload.changed(adapted_blocks=self._traced_blocks)
            not_drawn = diffusers.models.modeling_utils.no_init_weights()
            # peft would draw the adapter's numbers on the host first.
            with torch.device("meta"), not_drawn:
                add_adapter_as_practiced(self.family, transformer, work, dtype, practice)
        trained: nn.Module = transformer.train()
        return trained

    def _practice(self, quantization: str) -> AdapterPractice | None:
        return self.overheads.adapter_on(quantization) if self.overheads else None

    def _fill_caches(self, transformer: nn.Module, dtype: Any) -> None:
        """Make rotary tables that modules keep, or the first trace would count them as its own."""
        kernel = kernel_for("native", self.rules, self.masked(1))
        with self._running_configuration(), substitutes(kernel, self.rules), torch.no_grad():
            batch = self._batch(1, dtype)
            noise, levels = torch.empty_like(batch["latents"]), torch.empty(1, device="meta")
            noisy = self.family.noise.add_noise(noise, noise, levels)
            self.family.predict(transformer, noisy, levels, batch)

    def _traced(
        self,
        precision: str,
        quantization: str,
        kernel: str,
        size: int,
        recomputed: int,
        keeps_attention: bool = False,
        modulation: str = "resident",
        norm_rope: str = "stock",
        *,
        train: bool = True,
    ) -> trace.TracePass:
        """A pass whose first `recomputed` blocks recompute, all of them or all but attention."""
        transformer, dtype = self.model(precision, quantization, modulation), torch_dtype(precision)
        selective = recomputed if keeps_attention else 0
        apply_recomputation(transformer, self.family, recomputed - selective, selective)
        if self.family.attention_layouts:
            use_kernels(transformer, self.family.attention_layouts, norm_rope)
        own = self.overheads is None  # others neither pad for cuDNN nor copy what it reads
        batch = self._batch(size, dtype, token_multiple(kernel) if own else 1)
        practice = self._practice(quantization)
        autocast = dtype if practice and practice.autocasts and precision != "fp32" else None
        known = self.family, transformer, batch, kernel, self.rules
        return trace.trace_pass(*known, autocast=autocast, train=train, dense=own)

    def _batch(self, size: int, dtype: torch.dtype, token_multiple: int = 1) -> Batch:
        """A batch on the meta device; if it needs a mask, captions differ in length."""
        work, empty = self.workload, partial(torch.empty, dtype=dtype, device="meta")

        def sample(tokens: int) -> dict[str, torch.Tensor]:
            known = self.config, work.largest_bucket, tokens, work.num_control_images
            return {name: empty(shape) for name, shape in self.family.sample_shapes(*known).items()}

        text_tokens = work.max_text_tokens
        less = self.family.text_multiple if self.masked(size) else 0
        samples = [
            sample(tokens) for tokens in (text_tokens, *[max(1, text_tokens - less)] * (size - 1))
        ]
        batch = self.family.collate(samples, token_multiple)
        if work.base_passes:  # what the base predicted is there, too
            batch[PRIOR] = torch.empty_like(batch["latents"])
        return {name: tensor.to("meta") for name, tensor in batch.items()}

    def forward_bytes(self, precision: str, quantization: str, modulation: str = "resident") -> int:
        """Return the most that one item's forward pass takes without gradients."""
        kernel = kernel_for("native", self.rules, self.masked(1))
        known = precision, quantization, kernel, 1, 0
        passed = self.traced(*known, modulation=modulation, train=False)
        level = peak = 0
        for segment in (passed.before, *passed.forward, passed.between):
            peak = max(peak, level + segment.peak_bytes)
            level += segment.growth_bytes
        return peak

    def _vae_cost(self, precision: str) -> VaeCost:
        if not self.parts.vae_class:
            return VaeCost(0, (0, 0), (0, 0), (0, 0), 0, 0)
        dtype, bucket = torch_dtype(encoder_precision(precision)), self.workload.largest_bucket
        vae_class, family = getattr(diffusers, self.parts.vae_class), self.family
        with self._running_configuration():
            with torch.device("meta"):
                vae = vae_class.from_config(dict(self.parts.vae_config)).eval()
                # diffusers' own warns of parts that stay in fp32, even if there are none.
                torch.nn.Module.to(vae, dtype)
            size = bucket.num_frames, bucket.height_px, bucket.width_px
            shape = 1, *family.sample_shapes(self.config, bucket, 1)["latents"]

            def decode_latents() -> object:
                latents = torch.empty(shape, dtype=dtype, device="meta")
                return vae.decode(family.to_vae_latents(latents))

            def encode_pixels() -> object:
                pixels = torch.empty(3, *size, dtype=torch.float32, device="meta")  # as files give
                return family.encode_item(SimpleNamespace(vae=vae), pixels)

            encode = trace.trace_inference(encode_pixels, vae, self.rules)
            whole = trace.trace_inference(decode_latents, vae, self.rules, vae.decoder)
            if hasattr(vae, "enable_tiling"):
                vae.enable_tiling()
            for name in BLENDS & set(dir(vae)):
                setattr(vae, name, lambda _, tile, extent: tile)
            decode = trace.trace_inference(decode_latents, vae, self.rules, vae.decoder)
        weight_bytes = sum(p.numel() * p.element_size() for p in vae.parameters())
        flops = sum(count * work[2] for work, count in encode.work.items())
        moved = sum(count * work[3] for work, count in encode.work.items())
        is_gpu, passes = self.rules == "cuda", (encode, whole, decode)
        sizes = [(each.peak_bytes, holes_of(each.events) if is_gpu else 0) for each in passes]
        return VaeCost(weight_bytes, sizes[0], sizes[1], sizes[2], moved, flops)

    def _model_bytes(
        self, precision: str, quantization: str, modulation: str = "resident"
    ) -> ModelBytes:
        """Bytes of the full model: the shortened one's, its middle blocks repeated."""
        model = self.model(precision, quantization, modulation)
        blocks = self.family.blocks(model)
        index = self.index
        trainable = [[p for p in block.parameters() if p.requires_grad] for block in blocks]
        frozen_sizes = [_frozen_sizes(block) for block in blocks]
        frozen = [sum(sizes) for sizes in frozen_sizes]
        pinned = [region_offsets(sizes)[1] for sizes in frozen_sizes]
        outside = sum(_frozen_sizes(model)) - sum(frozen)
        all_trainable = [p for p in model.parameters() if p.requires_grad]
        in_blocks = {id(p) for block in trainable for p in block}
        outside_trainable = [p for p in all_trainable if id(p) not in in_blocks]
        full_trainable = [*outside_trainable, *(p for i in index for p in trainable[i])]
        plain = self.family.blocks(self.model(precision, "none", modulation))
        plain_sizes = [sum(_frozen_sizes(block)) for block in plain]
        buffers = [*model.buffers(), *attribute_tensors(model)]
        return ModelBytes(
            weight_bytes=outside + sum(frozen[i] for i in index),
            buffer_bytes=sum({id(t): t.untyped_storage().nbytes() for t in buffers}.values()),
            outside_bytes=outside,
            packing_bytes=self._packing_bytes(model, outside + sum(plain_sizes[i] for i in index)),
            adapter_bytes=sum(p.numel() * p.element_size() for p in full_trainable),
            adapter_parameters=sum(p.numel() for p in full_trainable),
            adapter_shapes=Counter(tuple(p.shape) for p in full_trainable),
            block_adapter_bytes=tuple(
                sum(p.numel() * p.element_size() for p in trainable[i]) for i in index
            ),
            block_weight_bytes=tuple(frozen[i] for i in index),
            block_pinned_bytes=tuple(pinned[i] for i in index),
            largest_block_bytes=max(plain_sizes),
            largest_layer_bytes=max(
                p.untyped_storage().nbytes() for block in plain for p in block.parameters()
            ),
            modulation=_away_modulation(find_modulation_ahead(model)),
        )

    def _packing_bytes(self, model: nn.Module, stored_bytes: int) -> int:
        names, late, last = self.family.block_lists, 0, self.index[-1]
        sizes = [region_offsets(_frozen_sizes(block))[1] for block in self.family.blocks(model)]
        if stored_bytes <= FILE_BYTES and names:  # by name, "9" after "10"; else as they are made
            at, first = names.index(max(names)), max(names)
            traced = range(sum(map(len, self.picked[:at])), sum(map(len, self.picked[: at + 1])))
            last = max((str(n), i) for n, i in enumerate(filter(traced.count, self.index)))[1]
            late = sum(sum(_frozen_sizes(m)) for name, m in model.named_children() if name > first)
        elif names and names[0] == max(names):  # read last of the file that two lists share, when
            # a block cut by its end lies there twice: half of it, in the mean
            return max(sizes[last], sizes[self.index[0]] - sizes[last] // 2)
        return max(0, sizes[last] - late)


def _away_modulation(ahead: ModulationAhead | None) -> ModulationBytes | None:
    if ahead is None:
        return None
    size, layers = ahead.dtype.itemsize, ahead.tensors.values()
    shapes = tuple((like.shape[1], like.shape[0]) for like in layers if like.ndim == 2)
    weight_bytes = size * sum(like.numel() for like in layers)
    largest = size * max(rows * columns for rows, columns in shapes)
    return ModulationBytes(weight_bytes, ahead.row_bytes, shapes, largest)


def _frozen_sizes(module: nn.Module) -> list[int]:
    parameters = [p for p in module.parameters() if not p.requires_grad]
    return [t.untyped_storage().nbytes() for p in parameters for t in trace.stored_tensors(p)]


def add_adapter_as_practiced(
    family: Family,
    transformer: nn.Module,
    workload: Workload,
    dtype: torch.dtype,
    practice: AdapterPractice | None,
) -> None:
    """Add the workload's adapter as a program does, or as autotune, to what computes in `dtype`.

    Autocast cannot be traced without a device: weights cast themselves whenever they are read.
    """
    if practice is None:
        add_adapter(family, transformer, workload, dtype)
        return
    own = torch.float32 if dtype == torch.float32 or practice.precision == "fp32" else dtype
    add_adapter(family, transformer, workload, own, lean=workload.adapter == "lokr")  # as theirs
    if practice.autocasts and own != dtype:
        _cast_when_read(transformer, dtype)


def _cast_when_read(transformer: nn.Module, dtype: torch.dtype) -> None:
    from peft.tuners.lora import LoraLayer
    from torch.nn.utils import parametrize

    class Cast(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.to(dtype)

    layers = [module for module in transformer.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        for matrix in (*layer.lora_A.values(), *layer.lora_B.values()):
            parametrize.register_parametrization(matrix, "weight", Cast(), unsafe=True)
