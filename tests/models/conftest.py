import pytest
import torch

from autotune.models.registry import FAMILIES
from autotune.system.process import silence_libraries, silence_progress_bars
from tests.models.small import make_small


@pytest.fixture(scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small_pipelines(tmp_path_factory, one_thread):
    silence_libraries()
    silence_progress_bars()
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_small(FAMILIES[name], tmp_path_factory.mktemp(name) / "pipeline")
        return made[name]

    return get


@pytest.fixture(params=sorted(FAMILIES))
def small(request, small_pipelines):
    return small_pipelines(request.param)
