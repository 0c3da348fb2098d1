"""A checkpoint of 2 GB in five shards converts and reverts in a process whose memory does not grow with it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=16384,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=1024,
    tie_word_embeddings=True,
)
NUM_SHARDS = 5
LIMIT = 160 * 2**20  # late imports, the model's skeleton, one copy buffer of 16 MiB; a shard has over 400 MB

# Prints how far the peak of resident memory rises above that of the imports, in bytes. (Not `ru_maxrss`: a process
# inherits that from the one that started it.)
MEASURED = """
import sys
from mhar.conversion.revert import revert_checkpoint
from mhar.conversion.stream import convert_checkpoint

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) * 1024

imports = peak()
convert_checkpoint(sys.argv[1], sys.argv[2], verify=False)
revert_checkpoint(sys.argv[2], sys.argv[3])
print(peak() - imports)
"""


def write_base(folder: Path) -> None:
    """Random float32 weights, one shard in memory at a time."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(CONFIG).state_dict().items()}
    del shapes["lm_head.weight"]
    shards: dict[str, list[str]] = {f"model-{i + 1:05d}-of-{NUM_SHARDS:05d}.safetensors": [] for i in range(NUM_SHARDS)}
    for name in shapes:
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        list(shards.values())[layer * NUM_SHARDS // CONFIG.num_hidden_layers].append(name)
    folder.mkdir()
    for file, names in shards.items():
        save_file({name: torch.rand(shapes[name]) for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    CONFIG.architectures = ["LlamaForCausalLM"]
    CONFIG.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path):
    base, out, back = tmp_path / "base", tmp_path / "out", tmp_path / "back"
    try:
        write_base(base)
        sizes = [path.stat().st_size for path in base.glob("*.safetensors")]
        assert sum(sizes) > 2_000_000_000
        assert max(sizes) > 2 * LIMIT
        command = [sys.executable, "-c", MEASURED, str(base), str(out), str(back)]
        growth = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"{sum(sizes) / 1e9:.2f} GB in {len(sizes)} shards: peak memory grew by {growth / 2**20:.0f} MiB")
        assert 0 < growth < LIMIT
        for path in base.glob("*.safetensors"):
            assert (back / path.name).stat().st_size == path.stat().st_size
    finally:
        for folder in (base, out, back):
            shutil.rmtree(folder, ignore_errors=True)
