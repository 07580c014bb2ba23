"""What another program takes of a device otherwise than autotune's executor, when it trains the
same."""

from typing import Literal

from pydantic import Field

from autotune.plan.base import Frozen, NaturalInt

Part = Literal["transformer", "text_encoders", "vae"]
KeptPhase = Literal["load", "cache", "train", "preview"]


class AdapterPractice(Frozen):
    """How a program holds and steps an adapter when the model computes in bf16; in fp32 all of
    it is in fp32."""

    precision: Literal["bf16", "fp32"]
    """Of its parameters and gradients."""
    autocasts: bool = False
    """Whether training runs under autocast: products are in the precision that the model
    computes in and norms in fp32, whatever their inputs are in; else each adapted layer copies
    its input to the adapter's precision."""
    optimizer_bytes: int = NaturalInt
    """For each of its parameters: what AdamW keeps, a second copy of the parameters included if
    there is one."""
    step_bytes: int = NaturalInt
    """For each of its parameters: what AdamW needs beyond that while it steps."""

    @property
    def text(self) -> str:
        """In words for people."""
        products = ", under autocast" if self.autocasts else ""
        inputs = (
            ", with a copy of each input" if self.precision == "fp32" and not self.autocasts else ""
        )
        return (
            f"the adapter in {self.precision}{products or inputs}, {self.optimizer_bytes} "
            "bytes of "
            "AdamW a parameter"
        )


class ProductPractice(Frozen):
    """How a program stores frozen layers of a weight format, and multiplies by them."""

    keeps: Literal["weights", "inputs"]
    """Until the backward pass of each layer: its weight in the precision of the products, as
    autograd does; or its input, for a gradient of the weight that is computed and that nobody
    uses."""
    everywhere: bool = False
    """Whether all linear layers are stored so, not those of blocks alone."""

    @property
    def text(self) -> str:
        """In words for people."""
        kept = {
            "weights": "each converted weight kept for its backward pass",
            "inputs": "gradients of weights, too",
        }
        return f"{kept[self.keeps]}{', all linear layers stored so' * self.everywhere}"


class KeptPart(Frozen):
    """A model that is on the device in a phase in which autotune's executor has it elsewhere."""

    phase: KeptPhase
    """What is kept in training is there in previews, too."""
    part: Part
    precision: Literal["bf16", "fp32"] = "bf16"
    """Of what no setting stores otherwise."""

    @property
    def text(self) -> str:
        """In words for people."""
        during = {
            "load": "loading",
            "cache": "caching",
            "train": "training",
            "preview": "previews",
        }[self.phase]
        precision = " in fp32" if self.precision == "fp32" else ""
        return f"{self.part.replace('_', ' ')}{precision} kept during {during}"


class Overheads(Frozen):
    """One program's ways with memory, as far as they were read in its source."""

    program: str
    version: str
    """Commit that they were read at."""
    source: str
    """Where in it."""
    adapter: AdapterPractice
    adapter_by_format: dict[str, AdapterPractice] = Field(default_factory=dict)
    """What differs from `adapter`, by the weight format of the layers that are adapted."""
    products: dict[str, ProductPractice] = Field(default_factory=dict)
    """By the weight format of frozen layers; others are stored and multiplied by as autotune
    does."""
    kept: tuple[KeptPart, ...] = ()

    @property
    def traced(self) -> tuple[object, ...]:
        """All that decides how a model is traced."""
        return self.adapter, tuple(self.adapter_by_format.items()), tuple(self.products.items())

    def adapter_on(self, weight_format: str) -> AdapterPractice:
        """How the adapter of layers is held that are stored in a format."""
        return self.adapter_by_format.get(weight_format, self.adapter)

    def has(self, part: Part, phase: str) -> bool:
        """Whether a part is kept in a phase."""
        return any(one.part == part and one.phase == phase for one in self.kept)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is taken for granted, one thing each."""
        others: dict[str, list[str]] = {}
        texts = [(name, one.text) for name, one in self.adapter_by_format.items()]
        for name, text in (*texts, *((name, one.text) for name, one in self.products.items())):
            others.setdefault(text, []).append(name)
        formats = tuple(f"with {' or '.join(names)}: {text}" for text, names in others.items())
        return (self.adapter.text, *formats, *(one.text for one in self.kept))

    @property
    def text(self) -> str:
        """The same in one sentence."""
        return (
            f"memory as {self.program} takes it, by its source ({self.version}): "
            f"{'; '.join(self.sentences)}"
        )
