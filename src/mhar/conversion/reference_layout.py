"""Checkpoints in the layout of the authors' public code -> `MharForCausalLM`.

Two kinds of folders: released models (`model_type` qwen3_attnres or llama_attnres, `attnres_*` keys) and golden cases
(`mode`, `variant`, `num_routing_heads`; the backbone in a file of its own). Parameter names are the same in both: per
sublayer `{attn,mlp}_res_proj.weight` [1, D], `_res_norm.weight` [D], `_res_alpha` ([] or [1]) and `_null_source` [D],
and `final_res_proj`, `final_res_norm` for the last site.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from mhar.errors import CheckpointError, nearest
from mhar.models import MharConfig, MharForCausalLM
from mhar.models.checkpoints import refuse_unsafe
from mhar.routing import RoutingConfig, SitePlan, routing_plan

# Released mode -> fields of RoutingConfig. Modes that end in _mh have `attnres_num_heads` heads, the others one.
MODES: dict[str, dict[str, Any]] = {
    "baseline": {"read": "none"},
    "full": {"read": "replace", "sources": "sublayer"},
    "full_mh": {"read": "replace", "sources": "sublayer"},
    "block": {"read": "replace", "sources": "block"},
    "block_mh": {"read": "replace", "sources": "block"},
    "delta": {"read": "add", "sources": "sublayer"},
    "delta_block": {"read": "add", "sources": "block"},
    "delta_mh": {"read": "add", "sources": "block"},
}
GATES = {"bias": "none", "none": "none", "learnable_alpha": "scalar", "scalar": "scalar"}
BASE_TYPES = {"qwen3_attnres": "qwen3", "llama_attnres": "llama"}
ROUTING_MARKS = ("_res_proj.", "_res_norm.", "_res_alpha", "_null_source")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """What a folder's config.json says, in one form for both kinds of folders."""

    base: dict[str, Any]  # fields of the base config, with its model_type
    mode: str
    num_heads: int
    num_blocks: int | None
    gate: str
    null_source: bool
    legacy_recursion: bool
    dtype: torch.dtype | None
    weight_files: tuple[Path, ...]

    def routing(self) -> RoutingConfig:
        """The routing that the released mode means; raises CheckpointError for one that this library does not have."""
        if self.mode not in MODES:
            raise CheckpointError(
                f"the checkpoint's mode {self.mode!r} is not one that mhar has{nearest(self.mode, MODES)}"
            )
        if self.gate not in GATES:
            raise CheckpointError(
                f"the checkpoint's gate type {self.gate!r} is not supported{nearest(self.gate, GATES)}"
            )
        fields = MODES[self.mode]
        adds, blocks = fields["read"] == "add", fields.get("sources") == "block"
        num_layers = self.base["num_hidden_layers"]
        return RoutingConfig(
            **fields,
            num_heads=self.num_heads,
            block_size=max(1, math.ceil(num_layers / (self.num_blocks or num_layers))) if blocks else 4,
            gate=GATES[self.gate],  # pyright: ignore[reportArgumentType]
            null_source=self.null_source,
            legacy_delta_recursion=adds and blocks and self.legacy_recursion,
            keep_empty_sites=adds,
        )


def from_reference(path: str | Path, *, dtype: torch.dtype | None = None) -> MharForCausalLM:
    """Load a folder in the public code's layout.

    Args:
        path: a released model's folder or a golden case.
        dtype: of the parameters; by default the one that config.json names.

    Returns:
        The model, in evaluation mode. The public code's block deltas follow a recursion (src_i = c_i - src_(i-1)) that
        `legacy_delta_recursion` reproduces; sites that can never train keep the parameters that the checkpoint brings.

    Raises:
        CheckpointError: no config.json or weights, a mode or gate that mhar does not have (named), missing or
            unexpected parameters (all listed).
    """
    settings = read_settings(Path(path))
    base_config = AutoConfig.for_model(settings.base["model_type"], **_without(settings.base, "model_type"))
    config = MharConfig.from_base(base_config, settings.routing())
    state: dict[str, Tensor] = {}
    for file in settings.weight_files:
        state |= load_file(file)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    state = translate(state, config)
    model = MharForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype or settings.dtype)
    return model.eval()


def read_settings(folder: Path) -> ReferenceSettings:
    """Read config.json of either kind; raises CheckpointError when it is neither."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"a checkpoint needs a config.json, found none in {folder}")
    values = json.loads(file.read_text())
    if "backbone_file" in values:
        return _golden_settings(folder, values)
    if values.get("model_type") in BASE_TYPES:
        return _released_settings(folder, values)
    raise CheckpointError(
        f"{file} is not in the public code's layout: model_type must be one of {', '.join(BASE_TYPES)}"
        f" (or the folder a golden case), got {values.get('model_type')!r}"
    )


def _golden_settings(folder: Path, values: dict[str, Any]) -> ReferenceSettings:
    model = values["model"]
    if values["routing_norm_eps"] != model["rms_norm_eps"]:
        raise CheckpointError(
            f"the routing norm must have the model's eps {model['rms_norm_eps']}, got {values['routing_norm_eps']}"
        )
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]}}
    return ReferenceSettings(
        base={**_without(model, "arch", "qk_norm", "rope_theta"), **rope, "model_type": model["arch"]},
        mode=values["mode"],
        num_heads=values["num_routing_heads"] or 1,
        num_blocks=values["num_blocks_requested"],
        gate="scalar" if (values["gate_type"] or "").startswith("scalar") else "none",
        null_source=bool(values["null_source"]),
        legacy_recursion=values["variant"] == "reference",
        dtype=getattr(torch, values["dtype"]),
        weight_files=((folder / values["backbone_file"]).resolve(), folder / values["routing_file"]),
    )


def _released_settings(folder: Path, values: dict[str, Any]) -> ReferenceSettings:
    refuse_unsafe(folder)
    mode = values.get("attnres_mode", "block")
    dtype = values.get("dtype") or values.get("torch_dtype")
    base = {name: value for name, value in values.items() if not name.startswith("attnres_")}
    return ReferenceSettings(
        base={**_without(base, "architectures", "auto_map"), "model_type": BASE_TYPES[values["model_type"]]},
        mode=mode,
        num_heads=values.get("attnres_num_heads", 8) if mode.endswith("_mh") else 1,
        num_blocks=values.get("attnres_num_blocks", 8),
        gate=values.get("attnres_gate_type", "bias"),
        null_source=values.get("attnres_use_null_source", False),
        legacy_recursion=True,
        dtype=None if dtype is None else getattr(torch, dtype),
        weight_files=tuple(sorted(folder.glob("*.safetensors"))),
    )


def translate(state: dict[str, Tensor], config: MharConfig) -> dict[str, Tensor]:
    """Stack the routing parameters of all sites into `model.router.*`; every other parameter keeps its name.

    Raises:
        CheckpointError: routing parameters that are missing, or that belong to no site (all listed).
    """
    routing = config.routing_config
    sites = [site for site in routing_plan(routing, config.num_sites) if site.row is not None]
    kinds = [] if routing.read == "none" else ["query", "norm_weight"]
    kinds += ["gate"] if routing.gate == "scalar" else []
    kinds += ["null_source"] if routing.null_source else []
    names = {kind: [released_name(site, kind) for site in sites] for kind in kinds}

    wanted = {name for kind in kinds for name in names[kind]}
    # The public class always makes a final site; add reads have none and never use it.
    unused = {"model.final_res_proj.weight", "model.final_res_norm.weight"} if routing.read == "add" else set[str]()
    present = {name for name in state if any(mark in name for mark in ROUTING_MARKS)} - unused
    if wanted != present:
        raise CheckpointError(
            f"routing parameters do not fit mode {routing.name!r}:"
            f" missing {sorted(wanted - present) or 'none'}; unexpected {sorted(present - wanted) or 'none'}"
        )
    rest = {name: tensor for name, tensor in state.items() if name not in wanted | unused}
    shape = {"query": (-1,), "norm_weight": (-1,), "gate": (), "null_source": (-1,)}
    stacked = {kind: torch.stack([state[name].reshape(shape[kind]) for name in names[kind]]) for kind in kinds}
    return rest | {f"model.router.{kind}": tensor for kind, tensor in stacked.items()}


def released_name(site: SitePlan, kind: str) -> str:
    """The public code's name of one site's parameter; `kind` is the name of a `DepthRouter` parameter."""
    prefix = "model.final" if site.name == "final" else f"model.{site.name}"
    return (
        prefix
        + {
            "query": "_res_proj.weight",
            "norm_weight": "_res_norm.weight",
            "gate": "_res_alpha",
            "null_source": "_null_source",
        }[kind]
    )


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
