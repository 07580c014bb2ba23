"""Text of at most 80 columns about machines, models, data and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.plan.hardware import Capability, Device, HardwareProfile, Rate
from autotune.plan.words import MEMORY
from autotune.report.text import (
    WIDTH,
    capped,
    memory_text,
    seconds_text,
    titled_lines,
    with_command,
    wrapped,
)

if TYPE_CHECKING:
    from autotune.data.dataset import DataReport
    from autotune.machine.catalog import CatalogGpu
    from autotune.machine.doctor import Finding
    from autotune.models.resolve import FetchedModel
    from autotune.weights.tensors import FileSummary

ABOUT_LISTING = "bf16 -: trains in fp16, some models in fp32. A part of the name will do: 4090."
MAX_NAMED = 20
PROBLEMS = {
    "captionless": "without a caption (write NAME.txt, or give --caption or --trigger)",
    "model": "that the model does not take",
    "broken": "broken, left out",
    "tiny": "too small, left out",
    "duplicate": "the same as another, left out",
    "control": "without a control image, left out",
    "short": "too short for a clip, left out",
    "variable": "of a variable rate, or below the model's",
    "mask": "a mask that fits no image, or such an image, left out",
    "black": "with a loss mask that is black everywhere",
    "run": "the output of training, left out",
    "unsupported": "of an unsupported format, left out",
    "metadata": "wrong in metadata",
    "unread": "that look like captions, not read",
    "link": "behind links that lead out of the folder, not read",
}
ABILITIES = {  # what people ask for, and the capabilities of which one is enough
    "bf16": ("precision.bf16",),
    "fp16": ("precision.fp16",),
    "fp8": ("precision.fp8",),
    "int8 weights": ("quantization.torchao-int8",),
    "NF4 weights": ("quantization.bnb-nf4",),
    "flash attention": tuple(
        f"attention.{name}" for name in ("_native_flash", "flash", "flash-3", "flash-4")
    ),
    "torch.compile": ("compile",),
}
VERDICTS = {"exact": "counts here", "near": "a prior here", "none": "does not count here"}


def profile_view(profile: HardwareProfile) -> RenderableType:
    """Show the device, its budget and why, the host, what it can use, and its rates."""
    device = profile.device
    parts: list[RenderableType] = [
        Text(device.name, style="bold") + Text(f"  {device.kind}:{device.index}", style="dim"),
        _facts(profile),
        Text("\nCapabilities", style="bold"),
        _capabilities(profile.capabilities),
    ]
    if profile.rates:
        noisy = " (noisy machine: trust these less)" if profile.noisy else ""
        parts += [Text(f"\nMeasured{noisy}", style="bold"), rates := _grid()]
    for rate in profile.rates:
        several = rate.num_samples >= 4
        spread = f"±{rate.spread / 2:.0%}" if several else f"n={rate.num_samples}"
        value = Text(_rate_text(rate), justify="right")
        rates.add_row(rate.name, value, Text(spread, style="dim"))
    return Group(*parts, *(Text(f"note: {note}", style="dim") for note in profile.notes))


def profile_lines(profile: HardwareProfile, findings: Sequence[Finding]) -> list[str]:
    """Say in a few lines what the machine is, what it can do and how fast, and what would hurt."""
    device, host, versions = profile.device, profile.host, profile.versions
    total, free = memory_text(device.total_memory_bytes), memory_text(device.free_memory_bytes)
    memory = f"{total}, {free} free; a run may take {memory_text(device.budget_bytes)}"
    software = {"driver": versions.driver, "CUDA": versions.cuda_runtime, "torch": versions.torch}
    system = f", {MEMORY['cpu']} {memory_text(host.memory_bytes)}" * (device.kind != "cpu")
    available = {one.name for one in profile.capabilities if one.available}
    ours = [name for name, ways in ABILITIES.items() if available.intersection(ways)]
    facts = [
        ("GPU" if device.kind == "cuda" else "device", device.name),
        (MEMORY[device.kind], memory),
        ("computer", f"{host.logical_cores} CPU threads{system}, {host.system}"),
        ("software", ", ".join(f"{name} {one}" for name, one in software.items() if one)),
        ("can do", ", ".join(ours)),
        ("cannot", ", ".join(name for name in ABILITIES if name not in ours) or "nothing of it"),
        ("speed", _speed_text(profile)),
    ]
    hurting = [finding.what for finding in findings if finding.severity != "note"]
    hurting += ["it was busy, so that its speeds count less"] * profile.noisy
    more = f" (and {len(hurting) - 1} more)" if len(hurting) > 1 else ""
    facts += [("warning", f"{hurting[0]}{more}: autotune doctor")] if hurting else []
    return titled_lines([*facts, ("more", "each ability and speed: autotune probe --verbose")])


def _speed_text(profile: HardwareProfile) -> str:
    found = {
        dtype: max(profile.rates_under(f"matmul.{dtype}.").values(), default=0.0)
        for dtype in ("bf16", "fp16", "fp32")
    }
    dtype = max(found, key=lambda name: found[name])
    if not found[dtype]:
        return "not measured"
    sheet = profile.datasheet
    published = getattr(sheet, f"{dtype}_flops_per_second", None)
    reached = getattr(sheet, f"reached_{dtype}_flops_per_second", None) or published
    text = f"{_flops_text(found[dtype])} in {dtype}"
    if reached:
        text += f", {found[dtype] / reached:.0%} of the catalog's {_flops_text(reached)}"
    return text


def findings_lines(findings: Sequence[Finding]) -> list[str]:
    """Tell the doctor's findings, worst first."""
    pairs = (((one.severity, one.what), ("fix:", one.fix)) for one in findings)
    return titled_lines(chain(*pairs)) or ["Nothing is wrong with this machine."]


def catalog_view(gpus: Sequence[CatalogGpu]) -> RenderableType:
    """List the catalog's GPUs."""
    style: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 1)}
    table = Table(**style, caption=ABOUT_LISTING, caption_justify="left")
    for column in ("name for --hardware", "sm", "memory", "bf16", "GB/s", "power", "kind"):
        is_text = column in ("name for --hardware", "kind")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for gpu in gpus:
        least = f"{gpu.min_power_watts:g}-" if gpu.min_power_watts else ""
        table.add_row(
            gpu.id,
            gpu.compute_capability,
            f"{gpu.memory_nominal_gb:g} GB",
            "-" if gpu.bf16_tflops is None else f"{gpu.bf16_tflops:g} TF",
            f"{gpu.memory_gb_per_second:g}",
            f"{least}{gpu.power_watts:g} W",
            gpu.memory_kind,
        )
    return table


def _facts(profile: HardwareProfile) -> Table:
    device, host, versions = profile.device, profile.host, profile.versions
    stack = {"torch": versions.torch, "CUDA": versions.cuda_runtime, "driver": versions.driver}
    names = ("cudnn", "triton", "diffusers", "torchao", "peft", "bitsandbytes")
    stack |= {name.replace("cudnn", "cuDNN"): getattr(versions, name) for name in names}
    software = ", ".join(f"{name} {version}" for name, version in stack.items() if version)
    cores = f"{host.physical_cores or '?'} cores, {host.logical_cores} usable threads"
    where = ", WSL" if host.memory_model == "wsl" else ""
    where += f", in {host.container}" if host.container else ""
    memory = f"{memory_text(device.total_memory_bytes)}, {device.memory_kind}"
    budget = Text(memory_text(device.budget_bytes), style="bold") + f": {device.budget_reason}"
    rows: dict[str, str | Text] = {
        "memory": f"{memory}: {device.memory_kind_reason}",
        "budget": budget,
        **(_cuda_facts(device) if device.kind == "cuda" else {}),
        "host": f"{host.cpu}, {cores}, {memory_text(host.memory_bytes)}, {host.system}{where}",
        "software": software,
        "fingerprint": profile.fingerprint[:23],
    }
    table = _grid()
    for title, value in rows.items():
        table.add_row(title, value if isinstance(value, Text) else Text(value))
    return table


def _cuda_facts(device: Device) -> dict[str, str]:
    version = "{}.{}".format(*device.compute_capability or ("?", "?"))
    l2 = "?" if device.l2_bytes is None else f"{device.l2_bytes / 2**20:g} MiB"
    of = f", device {device.index} of {device.count}" if device.count > 1 else ""
    limit = "?" if device.power_limit_watts is None else f"{device.power_limit_watts:g} W"
    held = device.other_process_bytes
    parts = [
        f"PCIe {device.pcie_generation or '?'} x{device.pcie_width or '?'}",
        f"power limit {limit}",
        "MIG slice" if device.mig else "",
        "drives a display" if device.drives_display else "",
        f"others hold {memory_text(held)}" if held else "",
        *(f"GPU {link.peer_index} over {link.path}" for link in device.links),
    ]
    return {
        "compute": f"capability {version}, {device.sm_count or '?'} SMs, L2 {l2}{of}",
        "link, power": ", ".join(filter(None, parts)),
    }


def _capabilities(capabilities: Sequence[Capability]) -> Table:
    rows: dict[tuple[str, bool, str], list[str]] = {}
    for capability in capabilities:
        group, _, choice = capability.name.rpartition(".")
        reason = "" if capability.available else capability.reason
        rows.setdefault((group, not capability.available, reason), []).append(choice)
    table = _grid()
    for (group, is_missing, reason), choices in sorted(rows.items(), key=lambda row: row[0][:2]):
        sign = Text("no", style="dim") if is_missing else Text("yes", style="green")
        text = Text(", ".join(choices), style="dim" if is_missing else "")
        why = Text(f": {reason}" if reason else "", style="dim")
        table.add_row(group or "other", sign, text + why)
    return table


def _rate_text(rate: Rate) -> str:
    if rate.unit == "FLOP/s":
        return _flops_text(rate.value)
    if rate.unit == "B/s":
        return f"{rate.value / 1e9:.2f} GB/s"
    if rate.unit == "B":
        return f"{rate.value / 2**20:.0f} MiB"
    return f"{rate.value * 1e3:.2f} ms" if rate.value >= 1e-3 else f"{rate.value * 1e6:.1f} us"


def _flops_text(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    return table


def fetched_lines(model: FetchedModel) -> list[str]:
    """Tell where a fetched model is, and how its files are known to be whole."""
    verified = f"{model.num_verified} files have the hub's checksums"
    if model.num_verified is None:
        verified = "complete, not verified: the hub is out of reach"
    at = f"{model.name}@{model.revision}"
    return [
        *wrapped(at),
        f"family: {model.family}",
        *with_command("folder:", str(model.folder)),
        f"size: {memory_text(model.size_bytes)}; {verified}",
        *with_command("next:", f"autotune plan --model {at} --data FOLDER"),
    ]


def data_report_lines(report: DataReport) -> list[str]:
    """Tell all about a data folder: the verdict, then shapes, then each file by name."""
    return [line for text in _data_texts(report) for line in wrapped(text)]


def _data_texts(report: DataReport) -> Iterator[str]:
    captionless = sum(problem.kind == "captionless" for problem in report.problems)
    why = f": {captionless} more without a caption" if captionless else ""
    verdict = "" if report.can_train else f", cannot be trained on{why}"
    yield f"{report.folder}: {report.num_usable} usable image(s){verdict}"
    if report.epoch_size != report.num_usable:
        yield f"  an epoch shows {report.epoch_size}: folders, metadata or a data.yaml repeat some"
    if report.num_with_controls:
        yield f"  {report.num_with_controls} with control images"
    if report.caption_words:
        fewest, median, most = report.caption_words
        yield f"  captions of {fewest} to {most} words, median {median}"
    if report.buckets:
        yield from ("", f"Shapes at {report.resolution_px} px")
    shapes = []
    for bucket in report.buckets:
        frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
        size = f"{bucket.width_px:>5} x {bucket.height_px:<5}"
        shapes.append(f"{size}{frames} {bucket.num_items:>6}")
    yield from (f"  {line}" for line in capped(shapes, MAX_NAMED, " shapes: --json lists all"))
    for names, what in (
        (report.enlarged, f"scaled up more than {report.max_upscaling:g}x (lower --resolution)"),
        (report.cropped, f"cropped by more than {report.max_crop:.0%} of the area"),
        (report.cut_captions, f"captions cut at the {report.max_caption_tokens} tokens that count"),
    ):
        if names:
            yield f"  {len(names)} {what}: {', '.join(capped(names, 3, ''))}"
    if report.num_unverified:
        later = "damage shows when they are encoded"
        yield f"  {report.num_unverified} not decoded for lack of time: {later}"
    for kind, title in PROBLEMS.items():
        found = [each for each in report.problems if each.kind == kind]
        if found:
            yield from ("", f"{len(found)} {title}")
        lines = [f"{each.file}: {each.message}" for each in found]
        yield from (f"  {line}" for line in capped(lines, MAX_NAMED, ": --json names all"))


def weights_lines(summary: FileSummary) -> str:
    """Tell what a safetensors file holds, one line per tensor."""
    dtypes = Counter(tensor.dtype for tensor in summary.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "none"
    bad = summary.num_nonfinite
    rows = []
    for tensor in sorted(summary.tensors, key=lambda tensor: tensor.name):
        counts = ((tensor.num_nan, "NaN"), (tensor.num_inf, "Inf"))
        odd = "".join(f" {count} {word}" for count, word in counts if count)
        shape, size = "x".join(map(str, tensor.shape)), memory_text(tensor.size_bytes)
        rows.append((tensor.name, f"{tensor.dtype:>7} {shape or 'scalar':>16} {size:>9}{odd}"))
    room = max(WIDTH - max((len(facts) for _, facts in rows), default=0) - 1, 12)
    lines = [
        f"{summary.name}: {memory_text(summary.size_bytes)}",
        f"tensors: {len(rows)} ({kinds})",
        f"values that are not finite: {'not counted' if bad is None else bad}",
    ]
    for name, value in sorted(summary.metadata.items()):
        told = wrapped(f"metadata {name}: {' '.join(value.split())}", 4)  # may be pages long
        lines += capped(told, MAX_NAMED, " lines: --json has all")
    lines.append("")
    for name, facts in rows:
        if len(name) > room:
            lines.append(name)
        lines.append(f"{name if len(name) <= room else '':<{room}} {facts}")
    return "\n".join(lines).rstrip()


def record_list_lines(rows: Sequence[Any]) -> list[str]:
    """Describe each record and, if that was asked, whether it counts on this machine."""
    lines = []
    for row in rows:
        memory = f"{memory_text(row.peak_memory_bytes)} in a step"
        numbers = f"{seconds_text(row.step_seconds)}, {memory}"
        lines += wrapped(f"{row.name[:12]}  {row.measured_on}  {row.device_name}", 4)
        lines += wrapped(f"    {row.family}  {row.work}  {row.num_trials} trials", 4)
        lines += wrapped(f"    {row.settings}: {numbers}", 0)
        if row.match:
            told = f": {'; '.join(row.reasons)}" if row.reasons else ""
            lines += wrapped(f"    {VERDICTS[row.match]}{told}", 4)
    return lines or ["no records yet: `autotune plan` makes them, `profiles pull URL` fetches them"]
