import json
import struct

import pytest


@pytest.fixture(scope="session")
def every_dtype():
    """Tensors of every dtype and every awkward shape, with NaN, infinities and negative zero
    among them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        tensors[name] = torch.randn(7, 5, generator=generator).to(getattr(torch, name))
    small = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float8_e8m0fnu"
    for name in small.split():
        tensors[name] = torch.ones(3).to(getattr(torch, name))
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["complex64"] = torch.tensor([1 + 2j])
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["large"] = torch.randn(300, 1000, generator=generator)
    return tensors


def save_model(folder, tensors, max_shard_bytes):
    from huggingface_hub import save_torch_state_dict

    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    names = {"filename_pattern": pattern, "max_shard_size": max_shard_bytes}
    save_torch_state_dict(dict(tensors), folder, **names)


def raw_file(header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write_raw(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def bits(tensor):
    import torch

    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def read_all(source, *, loader="pread"):
    import torch

    from autotune.weights.tensors import get_loader

    device = torch.device("cpu")
    return dict(get_loader(loader, device).stream(source, device))
