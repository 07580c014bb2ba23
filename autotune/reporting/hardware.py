"""What the terminal shows of a machine: its profile, the doctor's findings, the catalog. Pure;
fits 80 columns.
"""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.hardware import CatalogGpu, Finding
from autotune.reporting.text import memory_text
from autotune.schema import Capability, HardwareProfile, Rate

ABOUT_LISTING = "bf16 -: the card has none and trains in fp32. A part of the name will do: 4090."
STYLES = {"blocks": "bold red", "hurts": "yellow", "note": "dim"}


def profile_view(profile: HardwareProfile) -> RenderableType:
    """A profile: the device, its budget and why, the host, what it can use, and its rates."""
    parts: list[RenderableType] = [
        Text(profile.device.name, style="bold")
        + Text(f"  {profile.device.kind}:{profile.device.index}", style="dim"),
        _facts(profile),
        _heading("Capabilities"),
        _capabilities(profile.capabilities),
    ]
    if profile.rates:
        title = "Measured" + (" (noisy machine: trust these less)" if profile.noisy else "")
        parts += [_heading(title), _rates(profile.rates)]
    parts += [Text(f"note: {note}", style="dim") for note in profile.notes]
    return Group(*parts)


def findings_view(findings: Sequence[Finding]) -> RenderableType:
    """The doctor's findings, worst first."""
    if not findings:
        return Text("Nothing is wrong with this machine.", style="green")
    table = _grid()
    for finding in findings:
        body = Text(finding.what) + Text(f"\nfix: {finding.fix}", style="dim")
        table.add_row(Text(finding.severity, style=STYLES[finding.severity]), body)
    return table


def catalog_view(gpus: Sequence[CatalogGpu]) -> RenderableType:
    """The catalog's GPUs, one a line."""
    table = Table(
        box=None, pad_edge=False, padding=(0, 1), caption=ABOUT_LISTING, caption_justify="left"
    )
    table.add_column("name for --hardware", no_wrap=True)
    for column in ("sm", "memory", "bf16", "bandwidth", "power"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for gpu in gpus:
        bf16 = gpu.dense_tflops.get("bf16")
        table.add_row(
            gpu.id,
            gpu.compute_capability,
            f"{gpu.memory_nominal_gb:g} GB",
            "-" if bf16 is None else f"{bf16:g} TF",
            f"{gpu.memory_gb_per_second:g} GB/s",
            f"{gpu.power_watts:g} W",
            gpu.memory_kind,
        )
    return table


def _facts(profile: HardwareProfile) -> Table:
    device, host, versions = profile.device, profile.host, profile.versions
    cores = f"{host.physical_cores or '?'} cores, {host.logical_cores} usable threads"
    stack = {"torch": versions.torch, "CUDA": versions.cuda_runtime, "driver": versions.driver}
    stack |= {"cuDNN": versions.cudnn, "triton": versions.triton, "diffusers": versions.diffusers}
    stack |= {
        "torchao": versions.torchao,
        "peft": versions.peft,
        "bitsandbytes": versions.bitsandbytes,
    }
    facts: dict[str, str | Text] = {
        "memory": (
            f"{memory_text(device.total_memory_bytes)}, {device.memory_kind}: "
            f"{device.memory_kind_reason}"
        ),
        "budget": Text(memory_text(device.budget_bytes), style="bold")
        + Text(f": {device.budget_reason}"),
        **(
            {"compute": _compute(profile), "link, power": _link_and_power(profile)}
            if device.kind == "cuda"
            else {}
        ),
        "host": (
            f"{host.cpu}, {cores}, {memory_text(host.memory_bytes)}, {host.system}{_where(profile)}"
        ),
        "software": ", ".join(f"{name} {version}" for name, version in stack.items() if version),
        "fingerprint": profile.fingerprint[:23],
    }
    table = _grid()
    for name, fact in facts.items():
        table.add_row(
            name, fact if isinstance(fact, Text) else Text(fact)
        )  # text: brackets in a name are no markup
    return table


def _compute(profile: HardwareProfile) -> str:
    device = profile.device
    capability = (
        "?" if device.compute_capability is None else "{}.{}".format(*device.compute_capability)
    )
    l2 = "?" if device.l2_bytes is None else f"{device.l2_bytes / 2**20:g} MiB"
    of = f", device {device.index} of {device.count}" if device.count > 1 else ""
    return f"capability {capability}, {device.sm_count or '?'} SMs, L2 {l2}{of}"


def _link_and_power(profile: HardwareProfile) -> str:
    device = profile.device
    parts = [
        f"PCIe {device.pcie_generation or '?'} x{device.pcie_width or '?'}",
        "power limit "
        + ("?" if device.power_limit_watts is None else f"{device.power_limit_watts:g} W"),
        *(["MIG slice"] if device.mig else []),
        *(["drives a display"] if device.drives_display else []),
        *(
            [f"others hold {memory_text(device.other_process_bytes)}"]
            if device.other_process_bytes
            else []
        ),
        *[f"GPU {link.peer_index} over {link.path}" for link in device.links],
    ]
    return ", ".join(parts)


def _where(profile: HardwareProfile) -> str:
    wsl = ", WSL" if profile.host.memory_model == "wsl" else ""
    return wsl + (f", in {profile.host.container}" if profile.host.container else "")


def _capabilities(capabilities: Sequence[Capability]) -> Table:
    """One row per group of what is available, and one per reason of what is not."""
    rows: dict[tuple[str, bool, str], list[str]] = {}
    for capability in capabilities:
        group, _, choice = capability.name.rpartition(".")
        rows.setdefault(
            (group, capability.available, "" if capability.available else capability.reason), []
        ).append(choice)
    table = _grid()
    for (group, available, reason), choices in sorted(
        rows.items(), key=lambda row: (row[0][0], not row[0][1])
    ):
        sign = Text("yes", style="green") if available else Text("no", style="dim")
        text = Text(", ".join(choices), style="" if available else "dim")
        table.add_row(
            group or "other", sign, text + Text(f": {reason}", style="dim") if reason else text
        )
    return table


def _rates(rates: Sequence[Rate]) -> Table:
    table = _grid()
    for rate in rates:
        spread = f"±{rate.spread / 2:.0%}" if rate.num_samples >= 4 else f"n={rate.num_samples}"
        table.add_row(rate.name, Text(human_rate(rate), justify="right"), Text(spread, style="dim"))
    return table


def human_rate(rate: Rate) -> str:
    """A rate in the unit that people use: TFLOP/s, GB/s, MiB, ms, us."""
    if rate.unit == "FLOP/s":
        return (
            f"{rate.value / 1e12:.1f} TFLOP/s"
            if rate.value >= 1e12
            else f"{rate.value / 1e9:.1f} GFLOP/s"
        )
    if rate.unit == "B/s":
        return f"{rate.value / 1e9:.2f} GB/s"
    if rate.unit == "B":
        return f"{rate.value / 2**20:.0f} MiB"
    return f"{rate.value * 1e3:.2f} ms" if rate.value >= 1e-3 else f"{rate.value * 1e6:.1f} us"


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    return table


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold")
