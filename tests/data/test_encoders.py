"""Each way to place a text encoder gives the plain pipeline's embeddings."""

import pytest
import torch

from autotune.data.encode import Encoders
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings
from autotune.plan.job import ModelRef
from tests.kinds import KINDS
from tests.models.conftest import one_thread, small_pipelines  # noqa: F401 - fixtures
from tests.models.small import CAPTIONS
from tests.train.small import SETTINGS
from tests.weights.conftest import bits

CPU = torch.device("cpu")
EXACT = {
    "training": CachingSettings(),
    "cpu": CachingSettings(text_encoder_device="cpu"),
    "streamed": CachingSettings(text_encoder_streamed=True),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def small(request, small_pipelines):
    return small_pipelines(request.param)


def encoders_of(small, caching):
    return Encoders(resolve_model(ModelRef.of(small.folder)), caching, CPU, SETTINGS.precision)


@torch.no_grad()
def embeddings(small, pipeline):
    return small.family.encode_caption(pipeline, CAPTIONS[0], small.controls(small.bucket))


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize("way", EXACT)
def test_exact_ways_give_stock_embeddings(small, way):
    encoders = encoders_of(small, EXACT[way])
    pipeline = encoders.load_pipeline()
    expected = embeddings(small, small.pipeline)
    found = embeddings(small, pipeline)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert bits(found[name]) == bits(tensor), name
    pixels = small.pixels(small.bucket)
    with torch.no_grad():
        assert small.family.encode_pixels(pipeline, pixels).equal(
            small.family.encode_pixels(small.pipeline, pixels)
        )
    assert encoders.load_pipeline() is pipeline


def test_cache_key_follows_what_decides_values(small_pipelines):
    small = small_pipelines("qwen-image")
    ways = (
        (EXACT["training"], ""),
        (EXACT["streamed"], ""),
        (CachingSettings(text_encoder_quantization="torchao-int8"), "torchao-int8 2"),
        (CachingSettings(text_encoder_device="cuda:1"), " on cuda"),
    )
    for caching, expected in ways:
        assert encoders_of(small, caching).text_settings == expected
    places = ("cpu", "cuda:1")  # the cpu trains here
    plain, images = (encoders_of(small, CachingSettings(vae_device=at)).identity for at in places)
    assert plain == encoders_of(small, CachingSettings()).identity
    assert images.vae == f"{plain.vae} on cuda"
    assert images.text_encoder == plain.text_encoder
