"""Modulation ahead of time: layers are not there, what is learned is the same."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from autotune.knobs import modulation
from autotune.knobs.modulation import ModulationAhead, find_modulation_ahead
from autotune.models.registry import FAMILIES
from autotune.train.folder import ADAPTER_FILE
from autotune.train.loop import TrainingLoop
from autotune.train.model import load_model
from autotune.train.monitor import Monitor
from autotune.train.processes import Processes
from tests.train.conftest import CPU, PROMPT, Killed, kill_at, make_bench
from tests.train.small import SETTINGS

AHEAD = SETTINGS.changed(modulation="ahead")
ALONE = Processes(0, 1, CPU)
NAMES = [name for name, one in FAMILIES.items() if one.modulation and not one.max_controls]
# Kandinsky rounds queries and keys to bf16: the last bit of a time embedding becomes a bf16 step.
TOLERANCES = {name: 2e-3 if name.startswith("kandinsky5") else 1e-6 for name in NAMES}


@pytest.fixture(scope="module", params=NAMES)
def family_bench(request, bench, tmp_path_factory):
    name = request.param
    return bench if name == "qwen-image" else make_bench(tmp_path_factory.mktemp(name), name)


@pytest.fixture
def fetches(monkeypatch):
    """The number of conditionings of every time that all layers were fetched."""
    made = []
    compute = ModulationAhead._compute

    def counted(self, conditionings, rows):
        made.append(len(conditionings))
        compute(self, conditionings, rows)

    monkeypatch.setattr(ModulationAhead, "_compute", counted)
    return made


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setattr(modulation, "MAX_WINDOW_DRAWS", 8)


def loop_of(bench, plan, processes=ALONE):
    work, settings = plan.frozen.workload, plan.frozen.settings
    trained = load_model(bench.resolved, work, settings, CPU, plan.job.seed)
    for number, parameter in enumerate(trained.adapter):  # both halves away from zero
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.data.copy_(values / max(parameter.shape))
    return TrainingLoop(
        plan,
        trained,
        bench.encoded,
        None,
        processes=processes,
        checkpoints=None,
        monitor=Monitor(CPU),
        metrics=None,
        on_event=lambda event: None,
        preview=lambda step: None,
    )


def gradients(loop, num_steps):
    """AdamW's first moments after the steps: gradients of single steps and their sums."""
    found = []
    batches = iter(loop._make_loader())
    for step in range(num_steps):
        loop._step(step, batches)
        found += [state["exp_avg"].flatten() for state in loop.optimizer.inner.state.values()]
    return torch.cat(found).double()


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("checkpointed", [0, 2])
@pytest.mark.usefixtures("short_windows")
def test_gradients_are_the_same(family_bench, checkpointed, fetches):
    found = []
    settings = AHEAD.changed(checkpointed_blocks=checkpointed)
    for name in ("ahead", "resident"):
        plan = family_bench.plan(settings=settings.changed(modulation=name), caption_dropout=0.1)
        found.append(gradients(loop_of(family_bench, plan), 1))
    assert len(fetches) == 1  # no row was missing
    ahead, resident = found
    tolerance = TOLERANCES[family_bench.resolved.family.name]
    assert (ahead - resident).norm() < tolerance * resident.norm()
    assert resident.abs().max() > 0


@pytest.mark.quick("qwen-image")
@pytest.mark.usefixtures("short_windows")
def test_all_draws_come_from_windows(family_bench, fetches):
    plan = family_bench.plan(settings=AHEAD, num_steps=5, caption_dropout=0.1)
    loop = loop_of(family_bench, plan)
    ahead = find_modulation_ahead(loop.model.transformer)
    assert ahead is not None
    named = loop.model.transformer.named_parameters()
    left = {name for name, parameter in named if not parameter.requires_grad}
    folder = family_bench.model_folder / "transformer"
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert stored.keys() - left >= ahead.tensors.keys()
    assert not left & ahead.tensors.keys()
    gradients(loop, 5)
    assert ahead.table is not None
    assert len(fetches) == 3
    assert len(ahead.table) == 8
    loop.evaluate()  # steps 5 to 8: the window that is held, and two more
    assert sum(size > 2 for size in fetches) == 5


@pytest.mark.slow
@pytest.mark.usefixtures("short_windows")
def test_kills_and_previews_within_a_window(tmp_path, fetches):
    bench = make_bench(tmp_path / "flux", "flux1-dev")  # depends on the most
    watched, broken = tmp_path / "watched", tmp_path / "broken"
    job = {"num_steps": 5, "checkpointing_steps": 1, "preview_steps": 3}
    previews = {"preview_prompts": (PROMPT,), "preview_every": 2}
    bench.train(bench.plan(settings=AHEAD, output=str(watched), **job, **previews))
    # Windows from steps 0, 2, 4; two more for one evaluation, three for the other; four previews.
    assert len(fetches) == 3 + 2 + 3 + 4
    plan = bench.plan(settings=AHEAD, output=str(broken), **job)
    with pytest.raises(Killed):
        bench.train(plan, kill_at(4))
    assert bench.train(plan, resume=True).resumed_at == 3  # which is within a window
    one, other = (load_file(folder / ADAPTER_FILE) for folder in (watched, broken))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_random_weights_equal_resident_ones(bench, precision):
    losses = []
    random = replace(bench, resolved=replace(bench.resolved, folder=None))
    for settings in (AHEAD, SETTINGS):
        loop = loop_of(random, bench.plan(settings=settings.changed(precision=precision)))
        losses.append(loop._step(0, iter(loop._make_loader())).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.usefixtures("short_windows")
def test_each_process_computes_its_own_draws(bench, fetches):
    rank, share = 1, 2
    loop = loop_of(bench, bench.plan(settings=AHEAD), Processes(rank, 2, CPU))
    loop.windows.prepare(0)
    for step in (0, 1, 2, 3):  # a window is longer now: a step has two images
        parts = loop.order.micro_batches(step, share, rank=rank, world_size=2)
        samples = [bench.encoded.sample(index) for part in parts for index in part.indices]
        batch = loop._to_device(loop.model.collate(samples))
        loop.noising.loss(loop.model.family, loop.model.transformer, batch, step, rank * share)
    assert len(fetches) == 1
    place, loop.windows.place = loop.windows.place, dict.clear
    with pytest.raises(TypeError):  # in the middle of another window
        loop.windows.prepare(9)
    loop.windows.place = place
    loop.windows.prepare(0)
    assert len(fetches) == 2
