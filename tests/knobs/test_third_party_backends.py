"""Another distribution's attention backend and weight format are planned with, checked and
trained.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.api.checking import check
from autotune.backends import (
    ATTENTION_BACKENDS,
    WEIGHT_FORMATS,
    AttentionBackend,
    Registry,
    Requirements,
    WeightFormat,
    register,
)
from autotune.knobs.attention import Attention
from autotune.schema.plan_file import read_plan
from tests.training.small import write_model_and_images

ENTRIES = '''
"""What autotune reads: no torch."""

from autotune.backends import AttentionBackend, Requirements, WeightFormat

ATTENTION = AttentionBackend(
    "acme-attention",
    "Acme's attention",
    needs=Requirements(("cpu", "cuda")),
    kernel="math",
    function="acme.kernels:attention",
)
ROWS_INT8 = WeightFormat(
    "acme-int8",
    "Acme's rows of int8",
    quality="high",
    bytes_per_parameter=1.0,
    quantize="acme.kernels:quantize",
    stored_dtype="int8",
    tolerance=0.05,
    tolerance_reason="8 bits per row",
)
'''

KERNELS = '''
"""Attention written out, and a Linear on rows of int8. Each leaves a trace of having run."""

import os
from pathlib import Path

import torch
from torch import nn


def leave_trace(what):
    (Path(os.environ["ACME_TRACES"]) / f"{what}-{os.getpid()}").touch()


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
              return_lse=False, _parallel_config=None):
    leave_trace("attention")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if attn_mask is not None:
        mask = attn_mask[:, None, None] if attn_mask.ndim == 2 else attn_mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2)


class RowsInt8(nn.Linear):
    def forward(self, input):
        leave_trace("linear")
        return nn.functional.linear(input, self.weight.to(input.dtype) * self.scale.to(input.dtype), self.bias)


def quantize(layer):
    weight = layer.weight.data.float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
    layer.__class__ = RowsInt8
'''


def install(
    folder: Path, name: str, entry_points: str, group: str = "autotune.backends", **modules: str
) -> Path:
    """A distribution as pip would leave it in `folder`, which then belongs on PYTHONPATH."""
    package, info = folder / name, folder / f"{name}-1.0.dist-info"
    for made in (package, info):
        made.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, text in modules.items():
        (package / f"{module}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
    return folder


SEVERAL = """
import json, os, sys
from pathlib import Path
from autotune.cli import main
traces = Path(os.environ["ACME_TRACES"])
for words in json.loads(sys.argv[1]):
    sys.argv = ["autotune", *words]
    os.environ["ACME_TRACES"] = str(traces / words[0])
    Path(os.environ["ACME_TRACES"]).mkdir()
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    print(end="\\0", flush=True)
"""
"""Commands one after the other in one process, since each would import the same again."""


@dataclass(frozen=True)
class Acme:
    """A machine on which the distribution is installed."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.folder / "site"), os.environ.get("PYTHONPATH", "")))
        return {**os.environ, "PYTHONPATH": path, "ACME_TRACES": str(self.folder / "traces")}

    def python(self, script: str, *arguments: str) -> str:
        """What the script prints."""
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def has_run(self, what: str, command: str = ".") -> bool:
        return any((self.folder / "traces" / command).glob(f"{what}-*"))


@dataclass(frozen=True)
class Journey:
    """What commands on that machine wrote and printed."""

    acme: Acme
    printed: dict[str, str]

    @property
    def plan(self) -> Path:
        return self.acme.folder / "plan.yaml"


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Acme:
    folder = tmp_path_factory.mktemp("acme")
    entry_points = "attention = acme.entries:ATTENTION\nint8 = acme.entries:ROWS_INT8"
    install(folder / "site", "acme", entry_points, entries=ENTRIES, kernels=KERNELS)
    (folder / "traces").mkdir()
    return Acme(folder)


@pytest.fixture(scope="module")
def walked(acme: Acme) -> Journey:
    model, images = write_model_and_images(acme.folder)
    pins = (
        "--pin",
        "quantization=acme-int8",
        "--pin",
        "attention=acme-attention",
        "--max-trials",
        1,
    )
    data = ("--model", model, "--data", images, "--resolution", 32, "--rank", 2, "--steps", 4)
    asked = ("--model", "qwen-image", "--hardware", "nvidia-rtx-4090", "--resolution", 256)
    chosen = ("--quantization", "acme-int8", "--attention", "acme-attention")
    plan = acme.folder / "plan.yaml"
    commands: tuple[tuple[object, ...], ...] = (
        ("plan", *data, *pins, "-o", plan),
        ("check", plan, "--json"),
        ("train", plan, "--output", acme.folder / "result"),
        ("estimate", *asked, *chosen, "--json"),
    )
    printed = acme.python(SEVERAL, json.dumps([list(map(str, words)) for words in commands])).split(
        "\0"
    )
    return Journey(
        acme, {str(words[0]): text for words, text in zip(commands, printed, strict=False)}
    )


@pytest.mark.slow
def test_a_plan_is_made_checked_and_trained_with_entries_from_outside(walked: Journey) -> None:
    frozen = read_plan(walked.plan).frozen
    assert (frozen.settings.quantization, frozen.settings.attention) == (
        "acme-int8",
        "acme-attention",
    )
    assert frozen.expected.evidence == "measured"
    assert all(trial.outcome == "ok" for trial in frozen.trials)
    for command in ("plan", "train"):
        assert all(walked.acme.has_run(what, command) for what in ("attention", "linear"))
    assert json.loads(walked.printed["check"])["fits"]
    report = json.loads((walked.acme.folder / "result" / "report.json").read_text())
    assert report["verdict"]["num_unmoved"] == report["verdict"]["num_not_finite"] == 0
    assert 0 < report["quantization_error"]["overall"] < 0.05

    without = check(walked.plan)  # this process lacks the distribution
    assert not without.fits
    assert sum("does not know 'acme-" in misfit for misfit in without.misfits) == 2


@pytest.mark.slow
def test_the_cost_model_traces_a_format_from_outside(walked: Journey) -> None:
    prediction = json.loads(walked.printed["estimate"])["prediction"]
    weights = {phase["name"]: phase["breakdown"]["weight_bytes"] for phase in prediction["phases"]}
    assert (
        19 << 30 < weights["train"] < 21 << 30
    )  # 20.4 billion parameters, few of them outside the blocks


@pytest.mark.slow
def test_the_probe_measures_attention_from_outside(acme: Acme) -> None:
    script = """
from autotune.hardware.probing import probe
from autotune.hardware.rates import Meter
meter = Meter(probe(), lambda: None)
name, measure = next((name, call) for name, call in meter.measurements() if "acme" in name)
print(name, meter.attention("acme-attention", "fp32", 16).name)
"""
    expected = ["attention", "acme-attention", "256", "attention.acme-attention.fp32.16"]
    assert acme.python(script).split() == expected
    assert acme.has_run("attention")


def test_light_commands_find_entries_without_loading_what_they_name(acme: Acme) -> None:
    script = (
        "import sys; from autotune.backends import WEIGHT_FORMATS; "
        "print('acme-int8' in WEIGHT_FORMATS, 'acme.kernels' in sys.modules, 'torch' in "
        "sys.modules)"
    )
    assert acme.python(script).split() == ["True", "False", "False"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("raise RuntimeError('no licence')", "no licence"),
        ("ENTRY = 'int8'", "neither an AttentionBackend nor a WeightFormat"),
        (
            "from autotune.backends import AttentionBackend; ENTRY = AttentionBackend('native', "
            "'')",
            "already an entry called native",
        ),
    ],
)
def test_a_distribution_that_is_broken_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str, words: str
) -> None:
    site = install(tmp_path, "broken", "one = broken.entries:ENTRY", entries=entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), os.environ.get("PYTHONPATH", ""))))
    script = "from autotune.backends import WEIGHT_FORMATS; print(len(WEIGHT_FORMATS))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(len(WEIGHT_FORMATS))
    assert "broken.entries:ENTRY adds nothing to autotune" in done.stderr
    assert words in done.stderr


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ATTENTION_BACKENDS, WEIGHT_FORMATS):
        monkeypatch.setattr(registry, "_entries", dict(registry.items()))


@pytest.mark.usefixtures("registries")
def test_an_entry_registered_in_a_process_is_known_there() -> None:
    register(AttentionBackend("acme-attention", "Acme's"))
    register(WeightFormat("acme-int8", "Acme's", quality="high", bytes_per_parameter=1.0))
    assert "acme-attention" in Attention().names
    assert WEIGHT_FORMATS["acme-int8"].meets("high")
    assert not WEIGHT_FORMATS["acme-int8"].meets("exact")
    with pytest.raises(ValueError, match="already"):
        register(WeightFormat("acme-int8", "Another", quality="high", bytes_per_parameter=1.0))


def test_an_entry_needs_a_library_that_autotune_looks_for() -> None:
    with pytest.raises(ValueError, match="'torch'"):
        Requirements(library="torch")  # type: ignore[arg-type]


def test_the_versions_of_distributions_with_entries_are_known() -> None:
    assert Registry.load_extensions() == {}
