"""Text from a checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import Any

EPILOG = """\
examples:
  mhar generate runs/demo/mhar/checkpoint-300 --prompt "It is a truth universally acknowledged"
  echo "Once upon a time" | mhar generate ./checkpoint --greedy --max-new-tokens 40
"""


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(
        prog="mhar generate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a routed model with its tokenizer")
    options.add_argument("--prompt", help="text to continue (default: standard input)")
    options.add_argument("--tokenizer", metavar="FOLDER", help="tokenizer's folder, when the checkpoint has none")
    options.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="tokens to add (default 100)")
    options.add_argument("--greedy", action="store_true", help="the most likely token each time, instead of sampling")
    options.add_argument("--temperature", type=float, default=0.8, metavar="T", help="of sampling (default 0.8)")
    options.add_argument("--top-p", type=float, default=0.95, metavar="P", help="nucleus of sampling (default 0.95)")
    options.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling (default 0)")
    options.add_argument("--device", default="cpu", help="such as cpu or cuda (default cpu)")
    return options


def main(argv: list[str]) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(argv)
    _check(options)
    prompt = sys.stdin.read().rstrip("\n") if options.prompt is None else options.prompt

    from transformers import TextStreamer

    from mhar.models import MharForCausalLM

    tokenizer = _tokenizer(options.tokenizer or options.checkpoint)
    model: Any = MharForCausalLM.from_pretrained(options.checkpoint)
    model.to(options.device).eval()
    print(prompt, end="", flush=True)
    _continue(model, tokenizer, prompt, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), options)
    return 0


def _check(options: argparse.Namespace) -> None:
    from mhar.errors import InputError
    from mhar.models.devices import check_device
    from mhar.models.export import routed_config

    folder = Path(options.checkpoint)
    routed_config(folder)
    check_device(options.device)
    if options.tokenizer is None and not any(folder.glob("tokenizer*.json")):
        raise InputError(f"{folder} has no tokenizer: name its folder with --tokenizer")
    for name, value, valid in (
        ("--max-new-tokens", options.max_new_tokens, options.max_new_tokens > 0),
        ("--temperature", options.temperature, options.temperature > 0),
        ("--top-p", options.top_p, 0 < options.top_p <= 1),
    ):
        if not valid:
            rule = "in (0, 1]" if name == "--top-p" else "positive"
            raise InputError(f"{name} must be {rule}, got {value}")


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    from mhar.errors import InputError

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:  # what transformers raises for a folder without a usable one
        raise InputError(f"{folder} holds no tokenizer that can be loaded: {error}") from error


def _continue(model: Any, tokenizer: Any, prompt: str, streamer: Any, options: argparse.Namespace) -> None:
    """Generate after `prompt`, printing tokens as they come."""
    import torch

    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].shape[1] == 0:  # an empty prompt: start from the token that begins a text
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        inputs = {"input_ids": torch.tensor([[start or 0]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    sampling: dict[str, Any] = {"do_sample": False}
    if not options.greedy:
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p}
    torch.manual_seed(options.seed)
    model.generate(
        **{name: tensor.to(options.device) for name, tensor in inputs.items()},
        max_new_tokens=options.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=streamer,
        **sampling,
    )
