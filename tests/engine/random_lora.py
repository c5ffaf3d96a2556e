"""By hand: LoRA adapters of random numbers for a model, to serve several at once.

    python tests/engine/random_lora.py MODEL_DIR OUT_DIR [--number 2]

Writes OUT_DIR/lora-0, lora-1, ..., which `--enable-lora --lora-modules lora-0=OUT_DIR/lora-0 ...` serves.
They make no sense; that they change what the model says is for the comparison to show.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
STRENGTH = 0.05
"""Spread of the numbers. A guess: larger if answers of an adapter are those of the model itself."""


def write_adapter(config: dict[str, int], folder: Path, seed: int) -> None:
    """One adapter, on the queries and values of every layer."""
    random = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = hidden // heads
    sizes = {"q_proj": heads * head, "v_proj": config["num_key_value_heads"] * head}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (size, RANK))):
                numbers = STRENGTH * torch.randn(shape, generator=random)
                tensors[f"{place}.{part}.weight"] = numbers
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    kind = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(kind))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--number", type=int, default=2)
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    for i in range(options.number):
        write_adapter(config, options.out / f"lora-{i}", seed=i)


if __name__ == "__main__":
    main()
