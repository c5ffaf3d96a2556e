"""An EAGLE-3 head for a Llama, as vLLM runs it: one decoder layer over fused hidden states of the target.

Position t of the head takes the target's hidden states at t (of three layers, fused by `fc`) and the
embedding of token t+1, and says what token t+2 will be. Drafting further, it takes its own output in place
of the target's. Training imitates that ("training-time test", EAGLE-3, arXiv 2503.01840): `forward` runs
several such steps at every position at once, each seeing the target's text up to t and its own earlier steps.

Layout and names of the weights are those that vLLM loads (vllm/model_executor/models/llama_eagle3.py).
Shapes: B windows, T positions, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

AUX_LAYERS = (2, 15, 27)
"""Hidden states *entering* these layers of 30: vLLM's default (2, half, all but 3)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes, all taken from the target but the draft vocabulary."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    draft_vocab: int


class Attention(nn.Module):
    """Of 2H inputs (embedding, hidden state), with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, N, head_dim], keys and values repeated to all heads."""
        s = self.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:2], heads, s.head_dim).transpose(1, 2)

        q = self._rotate(split(self.q_proj(x), s.heads), positions)
        k = self._rotate(split(self.k_proj(x), s.kv_heads), positions)
        v = split(self.v_proj(x), s.kv_heads)
        copies = s.heads // s.kv_heads
        return q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)

    def join(self, y: Tensor) -> Tensor:
        """[B, heads, N, head_dim] to [B, N, H]."""
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = positions[:, None, :, None] * rates
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Layer(nn.Module):
    """vLLM's first EAGLE-3 layer: embedding and hidden state are normalised apart and joined."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
                "up_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
                "down_proj": nn.Linear(shape.intermediate, shape.hidden, bias=False),
            }
        )

    def joined(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Input of the attention, [B, N, 2H]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Both residual branches after the attention."""
        hidden = hidden + attended
        x = self.post_attention_layernorm(hidden)
        gated = functional.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return hidden + self.mlp["down_proj"](gated)


class Eagle3Head(nn.Module):
    """See the module docstring."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(AUX_LAYERS) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)

    def forward(self, embeds: Tensor, hidden: Tensor, branches: Tensor, num_steps: int) -> list[Tensor]:
        """Logits [B, N, D] of every step, for the N branches whose positions `branches` int64[N] holds.

        `embeds` [B, T + num_steps, H]: of token t+1 at t. `hidden` [B, T, 3H]: the target's at t.
        """
        t = hidden.shape[1]
        layer, attention = self.midlayer, self.midlayer.self_attn
        positions = torch.arange(t, dtype=torch.float32)[None]
        fused = self.fc(hidden)
        q, keys, values = attention.project(layer.joined(embeds[:, :t], fused), positions)
        attended = functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
        state = layer.finish(fused, attention.join(attended))[:, branches]
        logits = [self.lm_head(self.norm(state))]
        visible = torch.arange(t)[None, :] <= branches[:, None]  # [N, T]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, num_steps):
            x = layer.joined(embeds[:, branches + step], state)
            q, k, v = attention.project(x, (branches + step).float()[None])
            own.append((k, v))
            mixed = _attend(q, keys, values, visible, own)
            state = layer.finish(state, attention.join(mixed))
            logits.append(self.lm_head(self.norm(state)))
        return logits

    def load(self, folder: Path) -> Tensor:
        """Weights that `save` wrote; returns the draft vocabulary, int64[D]."""
        weights = load_file(folder / "model.safetensors")
        shifts = weights.pop("d2t")
        self.load_state_dict(weights)
        return shifts + torch.arange(len(shifts))

    def save(self, folder: Path, target_config: dict[str, Any], draft_ids: Tensor) -> None:
        """Write the folder that `--assist eagle3:FOLDER` takes. `draft_ids` int64[D]: target ids, rising."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()
        }
        weights["d2t"] = draft_ids - torch.arange(len(draft_ids))
        save_file(weights, folder / "model.safetensors")
        kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rms_norm_eps", "rope_parameters", "vocab_size", "hidden_act", "max_position_embeddings",
                "attention_bias", "bos_token_id", "eos_token_id")  # fmt: skip
        config = {name: target_config[name] for name in kept if name in target_config}
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(draft_ids),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of branches to the target's text and to their own steps, of which each sees only its own."""
    scale = q.shape[-1] ** -0.5
    scores = (q @ keys.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    extra = [(q * k).sum(-1, keepdim=True) * scale for k, _ in own]
    weights = torch.cat([scores, *extra], -1).softmax(-1)
    t = keys.shape[2]
    mixed = weights[..., :t] @ values
    for i, (_, v) in enumerate(own):
        mixed = mixed + weights[..., t + i, None] * v
    return mixed
