"""Folders that run where mhar is not installed: `auto_map`, the code beside the weights, and what servers ask for.

transformers fetches a model's code from its folder (`trust_remote_code=True`), following relative imports between
files of that one folder. The code written here is this package's own, one file per module, imports made relative.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from mhar.errors import CheckpointError, InputError
from mhar.models.modeling import MharForCausalLM, MharModel

# Published file -> module. Servers find classes through `auto_map`; save_pretrained would leave AutoModel out of it.
ENTRY_MODULES = {"configuration_mhar": "mhar.models.configuration", "modeling_mhar": "mhar.models.modeling"}
AUTO_MAP = {
    "AutoConfig": "configuration_mhar.MharConfig",
    "AutoModel": "modeling_mhar.MharModel",
    "AutoModelForCausalLM": "modeling_mhar.MharForCausalLM",
}
OWN_IMPORT = re.compile(r"^(\s*)from (mhar(?:\.\w+)*) import", re.MULTILINE)


def export_model(model: MharForCausalLM, folder: str | Path, **save_arguments: Any) -> None:
    """Save a model together with its code, after checking that servers can run it.

    Args:
        model: the model to save.
        folder: where to; `save_arguments` go to `save_pretrained` (such as `max_shard_size`).

    Raises:
        InputError: what a server needs and the model lacks (all listed).
    """
    if problems := serving_problems(model):
        raise InputError(f"servers cannot run this model: {'; '.join(problems)}")
    model.save_pretrained(folder, **save_arguments)
    add_remote_code(folder)


def add_remote_code(folder: str | Path) -> list[str]:
    """Write the code into the folder of a saved model and name it in config.json; returns the files' names.

    Raises:
        CheckpointError: the folder has no config.json of a routed model.
    """
    folder = Path(folder)
    values = routed_config(folder)
    sources = remote_code()
    for name, text in sources.items():
        (folder / name).write_text(text)
    file, temporary = folder / "config.json", folder / "config.tmp"
    temporary.write_text(json.dumps(values | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n")
    temporary.replace(file)
    return sorted(sources)


def routed_config(folder: Path) -> dict[str, Any]:
    """Contents of the config.json of a saved routed model; CheckpointError for any other folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"this must be the folder of a saved routed model, found no config.json in {folder}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if model_type != "mhar":
        raise CheckpointError(
            f"this must be the folder of a saved routed model (model_type 'mhar'), got {model_type!r} in {folder}"
        )
    return values


def remote_code() -> dict[str, str]:
    """File name -> source of every module that the models need, with relative imports."""
    sources: dict[str, str] = {}
    pending = list(ENTRY_MODULES.values())
    while pending:
        module = pending.pop()
        name = f"{published_name(module)}.py"
        if name in sources:
            continue
        text = module_source(module)
        pending += [match.group(2) for match in OWN_IMPORT.finditer(text)]
        sources[name] = OWN_IMPORT.sub(lambda m: f"{m.group(1)}from .{published_name(m.group(2))} import", text)
    return sources


def published_name(module: str) -> str:
    """ "mhar.routing.config" -> "mhar_routing_config"; the entry modules have the names that `auto_map` uses."""
    names = {module: name for name, module in ENTRY_MODULES.items()}
    return names.get(module, module.replace(".", "_"))


def module_source(module: str) -> str:
    """Source text of one of this package's modules."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def serving_problems(model: MharForCausalLM) -> list[str]:
    """What the transformers backends of vLLM and SGLang need and `model` lacks; empty for every supported family."""
    problems: list[str] = []
    for owner in (model, model.model):
        if not getattr(owner, "_supports_attention_backend", False):
            problems.append(f"{type(owner).__name__} does not let servers replace its attention")
    lists = [name for name, module in model.model.named_modules() if isinstance(module, nn.ModuleList)]
    if lists != ["layers"]:
        problems.append(f"the decoder must have one ModuleList, its layers; got {', '.join(lists) or 'none'}")
    if not isinstance(model.model, MharModel):
        problems.append(f"the decoder must be a MharModel, got {type(model.model).__name__}")
    if not model.tp_plan:
        problems.append("no tensor-parallel plan")
    return problems
