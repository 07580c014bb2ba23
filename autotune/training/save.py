"""Takes the trained adapter out of the model, in full precision, and saves it where it came from written beside it."""

from pathlib import Path

from autotune.families import ADAPTER_NAME
from autotune.schema import Workload
from autotune.training.model import TrainingModel
from autotune.training.step import AdapterOptimizer
from autotune.weights import AdapterInfo, save_adapter

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for in a folder."""


def save_trained(
    path: Path,
    model: TrainingModel,
    optimizer: AdapterOptimizer,
    workload: Workload,
    plan_digest: str,
    training_steps: int,
) -> None:
    """Write the fp32 master weights of the adapter under the keys that diffusers loads, whole or not at all."""
    from peft.utils import get_peft_model_state_dict

    masters = dict(zip(map(id, model.adapter), optimizer.masters, strict=True))
    named = {name: masters[id(p)].detach() for name, p in model.transformer.named_parameters() if id(p) in masters}
    info = AdapterInfo(
        model=workload.model.name,
        transformer=model.family.transformer_class,
        plan_digest=plan_digest,
        rank=workload.rank,
        alpha=workload.lora_alpha,
        training_steps=training_steps,
    )
    save_adapter(path, get_peft_model_state_dict(model.transformer, state_dict=named, adapter_name=ADAPTER_NAME), info)
