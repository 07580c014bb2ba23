"""`autotune models`: what is known of each published model, and what was predicted for a GPU."""

import json

import pytest
from autotune.reporting.models import UNVERIFIED, model_lines

from autotune.api.models import list_models
from autotune.errors import InvalidInput
from autotune.families.registry import FAMILIES
from autotune.planning.elsewhere import catalog_predictions
from tests.conftest import autotune_here


def test_every_published_model_is_listed_once_under_the_name_that_plans_it():
    names = [model.name for model in list_models()]
    assert len(set(names)) == len(names) == sum(len(family.models) for family in FAMILIES.values())
    assert {
        "wan-2.1",
        "wan-2.1-14b",
        "wan-2.2",
        "krea-2",
        "krea-2-turbo",
        "qwen-image-2512",
    } <= set(names)


def test_kinds_are_what_the_models_make():
    kinds = {model.family: model.kind for model in list_models()}
    assert [kinds[name] for name in ("sdxl", "qwen-image-edit-plus", "wan-2.2")] == [
        "image",
        "edit",
        "video",
    ]


def test_lines_give_license_doubt_and_notes_in_80_columns():
    models = list_models()
    lines = model_lines(models)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    turbo = next(model for model in models if model.name == "krea-2-turbo")
    assert f"12.82B*  {turbo.license}" in text
    assert "krea-2-turbo: distilled to 8 steps" in text
    assert UNVERIFIED in text
    assert "1.42B   apache-2.0" in text  # compared with the published configuration
    assert UNVERIFIED not in model_lines([model for model in models if model.is_verified])


def test_with_hardware_lines_say_what_fits_and_how_fast():
    models = {model.name: model for model in list_models("v100-pcie-16gb")}
    expected = {each.gpu: each for each in catalog_predictions("flux1-dev")}[
        "nvidia-v100-pcie-16gb"
    ]
    assert models["flux1-dev"].prediction == expected
    known = [model for model in models.values() if model.prediction]
    lines = model_lines(known, "v100-pcie-16gb")
    assert max(map(len, lines)) <= 80
    fitting = [model for model in known if model.prediction.step_seconds is not None]
    assert sum("does not fit" in line for line in lines) == len(known) - len(fitting)
    assert expected.settings
    assert (
        lines[[line.split()[0] for line in lines].index("flux1-dev") + 1].strip()
        in expected.settings.label()
    )
    assert sum(" s ±" in line for line in lines) == len(fitting)
    missing = models["flux1-dev"].model_copy(update={"prediction": None})
    assert "not computed" in model_lines([missing], "v100-pcie-16gb")[2]


def test_an_unknown_gpu_is_refused():
    with pytest.raises(InvalidInput, match="no hardware called"):
        list_models("4091")


def test_the_command_gives_json(capfd):
    process = autotune_here(capfd, "models", "--hardware", "4090", "--json")
    assert process.returncode == 0
    found = {model["name"]: model for model in json.loads(process.stdout)}
    assert found["flux1-dev"]["prediction"]["gpu"] == "nvidia-rtx-4090"
