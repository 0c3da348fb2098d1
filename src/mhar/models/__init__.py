"""Routed models on Hugging Face interfaces; importing this registers them with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mhar.models.configuration import MharConfig
from mhar.models.families import FAMILIES, Family
from mhar.models.modeling import MharForCausalLM, MharModel

AutoConfig.register("mhar", MharConfig, exist_ok=True)
AutoModel.register(MharConfig, MharModel, exist_ok=True)
AutoModelForCausalLM.register(MharConfig, MharForCausalLM, exist_ok=True)

__all__ = ["FAMILIES", "Family", "MharConfig", "MharForCausalLM", "MharModel"]
