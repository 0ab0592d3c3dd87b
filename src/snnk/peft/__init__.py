r"""SNNK adapters as a PEFT method: behind a linear layer y = Wx + b of a frozen model, y + v * (phi(y) A^T).

Importing this package registers the method, so that get_peft_model, PeftModel.from_pretrained and the load_adapter of
transformers can use it.
"""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import PeftType, register_peft_method

from snnk.peft.config import PEFT_TYPE, SNNKConfig
from snnk.peft.directions import fit_directions_
from snnk.peft.lora import to_lora
from snnk.peft.model import SNNKModel

__all__ = ["SNNKConfig", "fit_directions_", "to_lora"]


def register() -> None:
    """Register the method with PEFT; a second call changes nothing."""
    # PEFT's enum is closed, and a plain string in its place breaks transformers' load_adapter
    if "SNNK" not in PeftType.__members__:
        member = str.__new__(PeftType, "SNNK")
        member._name_, member._value_ = "SNNK", "SNNK"
        setattr(PeftType, "SNNK", member)  # noqa: B010, mypy finds no such attribute
        PeftType._member_names_.append("SNNK")
        PeftType._member_map_["SNNK"] = member
        PeftType._value2member_map_["SNNK"] = member
    if PeftType("SNNK") not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name="snnk", config_cls=SNNKConfig, model_cls=SNNKModel, prefix=SNNKModel.prefix)
    PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = SNNKConfig  # type: ignore[index]
    PeftType._value2member_map_[PEFT_TYPE] = PeftType("SNNK")


register()
