"""GGUF to safetensors, as `python -m agentspec_runtime.embedded.convert GGUF FOLDER`. See `model.py`.

Float32, because that is what the quantised weights expand to: a server that asks for bfloat16 rounds
once, a test that asks for float32 gets the same numbers on every machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from agentspec_runtime.embedded.model import EMBEDDED_MODEL_NAME

__all__ = ["convert"]

# What the model was trained for; the GGUF says so for the weights and nothing for the tokenizer.
_CONTEXT_TOKENS: Final = 8192


def convert(gguf: Path, target: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` into the folder `target`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, model_max_length=_CONTEXT_TOKENS
    )
    tokenizer.save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["_name_or_path"] = EMBEDDED_MODEL_NAME  # the GGUF carries the name of a training run
    config_path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    # The model's own template knows no tools; `model.py` puts ours in its place.
    (target / "chat_template.jinja").unlink(missing_ok=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
