import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.models.latents import pack, unpack
from autotune.models.registry import FAMILIES

collate = FAMILIES["qwen-image"].collate

sides = st.integers(1, 6).map(lambda half: 2 * half)


@given(st.integers(1, 3), st.integers(1, 5), sides, sides)
@settings(max_examples=40)
def test_unpack_undoes_pack_and_tokens_hold_one_patch(size, channels, height, width):
    latents = torch.arange(size * channels * height * width).view(size, channels, 1, height, width)
    tokens = pack(latents)
    assert tokens.shape == (size, height * width // 4, channels * 4)
    assert torch.equal(unpack(tokens, latents.shape), latents)
    assert torch.equal(tokens[-1, -1], latents[-1, :, 0, -2:, -2:].flatten())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(max_examples=60)
def test_collate_pads_and_masks_only_where_lengths_differ(lengths):
    samples = [
        {
            "latents": torch.full((2, 1, 2, 2), float(i)),
            "prompt_embeds": torch.full((length, 4), i + 1.0),
        }
        for i, length in enumerate(lengths)
    ]
    batch = collate(samples)
    assert batch["prompt_embeds"].shape == (len(lengths), max(lengths), 4)
    assert ("prompt_mask" in batch) == (len(set(lengths)) > 1)
    for i, length in enumerate(lengths):
        assert torch.equal(batch["prompt_embeds"][i, :length], samples[i]["prompt_embeds"])
        assert not batch["prompt_embeds"][i, length:].any()
        assert torch.equal(batch["latents"][i], samples[i]["latents"])
        if "prompt_mask" in batch:
            assert batch["prompt_mask"].dtype == torch.bool
            assert batch["prompt_mask"][i].tolist() == [k < length for k in range(max(lengths))]
