"""A GPU is found by as much of its name as means it alone; a name that means several is refused
with all of them."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.machine.catalog import SERIES, VARIANTS, load_catalog
from autotune.machine.probe import hardware_named, save_profile

IDS = [gpu.id for gpu in load_catalog()]
WORDS = sorted({word for id_ in IDS for word in id_.split("-")})
NUMBERS = Counter(
    word for id_ in IDS for word in id_.split("-") if re.fullmatch(r"[a-z]{0,2}\d+[a-z]?", word)
)


def meant(name):
    sheet = hardware_named(name).datasheet
    assert sheet is not None
    return sheet.id


def all_meant(error):
    """The ids that a refusal offers."""
    return {*error.message.partition(" any of ")[2].split(", ")} - {""}


def refusal(name):
    with pytest.raises(InvalidInput) as caught:
        hardware_named(name)
    assert "--list" in caught.value.hint
    return caught.value


@pytest.mark.parametrize("gpu", load_catalog(), ids=lambda gpu: gpu.id)
def test_every_card_is_found_by_its_id_with_and_without_maker_and_series_and_by_what_cuda_calls_it(
    gpu,
):
    short = gpu.id.removeprefix("nvidia-").removeprefix("rtx-")
    for name in (
        gpu.id,
        gpu.id.upper(),
        gpu.id.removeprefix("nvidia-"),
        short,
        f"RTX {short}",
        gpu.name,
    ):
        assert meant(name) == gpu.id


@given(
    st.sampled_from(IDS),
    st.lists(st.sampled_from([" ", "-", "_", "  "]), min_size=8, max_size=8),
    st.randoms(),
)
def test_words_may_be_joined_and_written_in_any_way(id_, joints, random):
    words = [random.choice([word, word.upper(), word.title()]) for word in id_.split("-")]
    assert meant("".join(itertools.chain(*zip(words, joints, strict=False)))) == id_


@pytest.mark.parametrize(
    "number", sorted(number for number, count in NUMBERS.items() if count == 1)
)
def test_a_number_that_one_card_has_is_enough_unless_the_card_is_another_than_it_names(number):
    card = next(id_ for id_ in IDS if number in id_.split("-"))
    if VARIANTS.isdisjoint(card.split("-")):
        assert meant(number) == card
    else:
        assert card in refusal(number).hint


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True))
def test_whatever_is_found_has_every_word_and_whatever_is_refused_names_cards(words):
    name = " ".join(words)
    telling = {*words} - {*SERIES}
    holding = [id_ for id_ in IDS if telling <= {*id_.split("-")}]
    try:
        found = {meant(name)}
    except InvalidInput as error:
        found = all_meant(error)
        assert len(found) != 1, "the one that it means"
    assert found <= {*holding}


@pytest.mark.parametrize(
    ("name", "id_"),
    [
        ("4090", "nvidia-rtx-4090"),
        ("4080", "nvidia-rtx-4080"),
        ("RTX 4080", "nvidia-rtx-4080"),
        ("4080 super", "nvidia-rtx-4080-super"),
        ("GeForce_RTX_4080_Super", "nvidia-rtx-4080-super"),
        ("3080", "nvidia-rtx-3080"),
        ("3080-ti", "nvidia-rtx-3080-ti"),
        ("4060 ti", "nvidia-rtx-4060-ti-16gb"),
        ("h200", "nvidia-h200-sxm"),
        ("a100 40gb", "nvidia-a100-40gb"),
        ("v100 pcie 16gb", "nvidia-v100-pcie-16gb"),
        ("RTX 4000 Ada", "nvidia-rtx-4000-ada"),
        ("T4", "nvidia-t4"),
        ("l40s", "nvidia-l40s"),
    ],
)
def test_names_that_people_use(name, id_):
    assert meant(name) == id_


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("h100", {"nvidia-h100-sxm", "nvidia-h100-pcie"}),
        ("A100 PCIe", {"nvidia-a100-pcie-40gb", "nvidia-a100-pcie-80gb"}),
        ("v100 32gb", {"nvidia-v100-sxm2-32gb", "nvidia-v100-pcie-32gb"}),
        ("gh200", {"nvidia-gh200-96gb", "nvidia-gh200-144gb"}),
        ("rtx 6000", {"nvidia-rtx-6000-ada", "nvidia-rtx-pro-6000"}),
    ],
)
def test_a_name_of_several_cards_is_refused_with_all_of_them(name, ids):
    assert all_meant(refusal(name)) == ids


@pytest.mark.parametrize(
    "name", ["", " ", "-", "nvidia", "GeForce RTX", "l40", "90", "4090d", "quadro rtx 4000"]
)
def test_a_name_of_no_card_is_refused(name):
    assert "no hardware called" in refusal(name).message


@pytest.mark.parametrize(
    ("name", "other"), [("4070 Ti", "4070-ti-super"), ("4060", "4060-ti-16gb")]
)
def test_a_card_that_is_not_known_is_not_taken_for_its_ti_or_super(name, other):
    assert f"another card is nvidia-rtx-{other}" in refusal(name).hint


def test_a_saved_profile_goes_before_a_part_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_profile(hardware_named("nvidia-b200"), tmp_path / "4090")
    assert meant("4090") == "nvidia-b200"
    assert meant("nvidia-rtx-4090") == "nvidia-rtx-4090"
