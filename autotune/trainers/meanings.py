"""What keys mean that autotune does not read, in words that the trainers' tables share."""

from collections.abc import Mapping
from textwrap import dedent

SHARED: Mapping[str, str] = {
    "adapter": "another kind of adapter; autotune plans a plain LoRA",
    "attention": "attention that has no backward, or that autotune does not offer",
    "augmented": "images are augmented",
    "average": "an average of the weights over steps is kept; autotune keeps none",
    "buckets": "images are always sorted into buckets by shape",
    "cached": "latents and captions are always cached, then the encoders freed",
    "captions": "captions are changed while it trains",
    "class": "images of the class, beside those of the subject",
    "clips": "clips are cut otherwise",
    "device": "what stays on the device is decided by its memory",
    "encoders": "text encoders are trained, too",
    "family": "the family decides",
    "files": "captions are read from other files",
    "gradients": "gradients are in 16 bits, too",
    "host": "activations wait on the host; autotune recomputes them",
    "loss": "the loss or its weights are others",
    "masks": "masks weigh parts of images",
    "merged": "another adapter is loaded or merged first",
    "named": "it names the run or says how it is saved and logged",
    "noise": "noise is drawn otherwise",
    "previews": "previews are sampled as the family's pipeline does",
    "products": "products are in 8 bits, too",
    "rate": "the rate is multiplied",
    "repeats": "the number of steps decides, not how often a folder is repeated",
    "schedule": "another schedule's shape",
    "states": "8-bit states of the optimizer",
    "v": "the model's own scheduler says what it predicts",
    "validation": "part of the images is left for validation",
    "weights": "every weight is trained, not an adapter",
}


def meanings(text: str) -> dict[str, str]:
    """Words, or one that stands for shared words, and after a colon the keys; what is indented
    goes on a line.
    """
    lines = dedent(text).strip().replace("\n ", " ").splitlines()
    pairs = (line.split(": ", 1) for line in lines)
    return {SHARED.get(words, words): keys for words, keys in pairs}
