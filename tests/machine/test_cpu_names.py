"""What a CPU is called: records of two machines are compared by it if it trains."""

from pathlib import Path

import pytest

from autotune.machine import sources
from autotune.machine.sources import System, Unavailable

XEON = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) "
    "8480+\n"
)
ARM = """processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd
CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (XEON, "Intel(R) Xeon(R) 8480+"),
        ("processor : 0\nModel : Raspberry Pi 5 Model B\n", "Raspberry Pi 5 Model B"),
        (ARM, "aarch64 0x41/0xd4f"),
        ("", "aarch64"),
        ("\udcff", "aarch64"),
    ],
)
def test_on_linux_the_kernel_says(
    text: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setattr(sources, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(sources.platform, "system", lambda: "Linux")
    monkeypatch.setattr(sources.platform, "processor", lambda: "")
    monkeypatch.setattr(sources.platform, "machine", lambda: "aarch64")
    assert System(torch=False).query("os", "cpu") == name


def test_one_apple_chip_is_told_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(sources, "BRAND", ("printf", "Apple M3 Max\\n"))
    assert System(torch=False).query("os", "cpu") == "Apple M3 Max"
    monkeypatch.setattr(sources, "BRAND", ("false",))
    with pytest.raises(Unavailable):
        System(torch=False).query("os", "cpu")
