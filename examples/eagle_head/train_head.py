"""Train an EAGLE-3 head for the embedded model on recorded agent runs, on a CPU, within two hours.

    python examples/eagle_head/train_head.py --traces FILE.jsonl.gz ... --out head [--minutes 40]

Uses three quarters of the tasks of every file (`--set-aside tune` of the benchmarks); the rest is looked at
only for the report. Loss: cross entropy of the token that was recorded, on generated tokens, 0.8^step for the
further steps. At the end it writes `report.json`: loss curve, and acceptance by position against the recorded
text of the tasks set aside, which is what a replay verifies (the served model itself would write other text).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from head import AUX_LAYERS, Eagle3Head, Shape
from text import Window, windows
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from agentspec_runtime.bench.simulate import select_part
from agentspec_runtime.bench.tokens import load_tokens
from agentspec_runtime.embedded import prepare_embedded_model

STEPS = 3
DECAY = 0.8
BATCH = 2
"""Windows: small, because with so little time the number of updates counts."""
REPORT_STEPS = 5


class Trainer:
    """Target, head and optimiser."""

    def __init__(self, model: str, draft_vocab: int, counts: Counter[int], peak: float) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.target.requires_grad_(requires_grad=False)
        self.config: dict[str, Any] = self.target.config.to_dict()
        c = self.config
        shape = Shape(
            hidden=c["hidden_size"], intermediate=c["intermediate_size"], heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"],
            rope_theta=c["rope_parameters"]["rope_theta"], eps=c["rms_norm_eps"], draft_vocab=draft_vocab,
        )  # fmt: skip
        self.draft_ids = _draft_vocabulary(counts, draft_vocab, c["vocab_size"])
        self.to_draft = torch.full((c["vocab_size"],), -1)
        self.to_draft[self.draft_ids] = torch.arange(draft_vocab)
        self.embedding = self.target.get_input_embeddings()
        self.head = Eagle3Head(shape)
        _start_from_target(self.head, self.target, self.draft_ids)
        self.peak = peak
        self._known: dict[int, Tensor] = {}
        self.optimiser = torch.optim.AdamW(
            self.head.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01
        )

    def losses(self, batch: list[Window], num_steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Per step: cross entropy of tokens in the draft vocabulary, and of all drafts whose tokens before
        were hits, whether this one is; bool.
        """
        length = max(len(window.ids) for window in batch)
        ids = torch.zeros(len(batch), length + num_steps + 1, dtype=torch.int64)
        wanted = torch.zeros(len(batch), length + num_steps + 1, dtype=torch.bool)
        for i, window in enumerate(batch):
            ids[i, : len(window.ids)] = torch.from_numpy(window.ids)
            wanted[i, : len(window.ids)] = torch.from_numpy(window.generated)
        hidden = torch.zeros(len(batch), length, len(AUX_LAYERS) * self.head.shape.hidden)
        for i, window in enumerate(batch):
            hidden[i, : len(window.ids)] = self._states(window)
        with torch.no_grad():
            embeds = self.embedding(ids[:, 1:])
        # Branch t says what token t+2 is: only those where that is a generated token of some window.
        branches = torch.nonzero(wanted[:, 2 : length + 2].any(0)).flatten()
        branches = branches[branches < length - 1]
        loss, hits = [], []
        alive = torch.ones(len(batch), len(branches), dtype=torch.bool)
        for step, logits in enumerate(self.head(embeds, hidden, branches, num_steps)):
            at = branches + 2 + step
            # A draft's k-th token is asked for only where those before it were generated, too.
            asked = torch.stack([wanted[:, branches + 2 + s] for s in range(step + 1)]).all(0)
            labels = self.to_draft[ids[:, at]]
            usable = asked & (labels >= 0)
            total = functional.cross_entropy(logits[usable], labels[usable], reduction="sum")
            loss.append(total / max(int(usable.sum()), 1))
            hit = logits.argmax(-1) == labels
            hits.append(hit[asked & alive].detach())
            alive &= hit
        return loss, hits

    @torch.no_grad()
    def _states(self, window: Window) -> Tensor:
        """The target's hidden states, [N, 3H]; computed once, since the target does not change."""
        known = self._known.get(id(window))
        if known is None:
            states = self.target.model(torch.from_numpy(window.ids)[None], output_hidden_states=True)
            known = torch.cat([states.hidden_states[layer][0] for layer in AUX_LAYERS], -1).half()
            self._known[id(window)] = known
        return known.float()

    def step(self, batch: list[Window], done: float) -> float:
        """One update; `done` is the share of the training that is over. Returns the first step's loss."""
        rate = min(1.0, done / 0.03 + 0.02) * (0.5 * (1 + math.cos(math.pi * done)) * 0.95 + 0.05)
        for group in self.optimiser.param_groups:
            group["lr"] = self.peak * rate
        loss, _ = self.losses(batch, STEPS)
        total = torch.stack([DECAY**i * part for i, part in enumerate(loss)]).sum()
        self.optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self.optimiser.step()
        return float(loss[0].detach())

    @torch.no_grad()
    def acceptance(self, chosen: list[Window]) -> list[float]:
        """Share of recorded tokens hit at each position of a draft, given that those before were hit."""
        hits = [[0, 0] for _ in range(REPORT_STEPS)]
        for window in chosen:
            _, found = self.losses([window], REPORT_STEPS)
            for cell, row in zip(hits, found, strict=True):
                cell[0] += int(row.sum())
                cell[1] += len(row)
        return [round(hit / max(asked, 1), 4) for hit, asked in hits]


def _draft_vocabulary(counts: Counter[int], size: int, vocab_size: int) -> Tensor:
    common = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts)
    while len(common) < size:
        common.append(next(rest))
    return torch.tensor(sorted(common))


def _start_from_target(head: Eagle3Head, target: Any, draft_ids: Tensor) -> None:
    """The target's last layer as a start: norms, MLP and output rows, and attention for the hidden half."""
    last, hidden = target.model.layers[-1], head.shape.hidden
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[draft_ids])
        # The target's logits are for the token before: begin less sure of them than it is.
        head.norm.weight.copy_(0.3 * target.model.norm.weight)
        head.fc.weight[:, : 2 * hidden] *= 0.3
        head.fc.weight[:, 2 * hidden :] += 0.5 * torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head.midlayer.self_attn, name).weight
            weight[:, :hidden] *= 0.5
            weight[:, hidden:] = getattr(last.self_attn, name).weight
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.input_layernorm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            head.midlayer.mlp[name].weight.copy_(getattr(last.mlp, name).weight)


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--traces", nargs="+", type=Path, required=True, help="recordings (docs/measuring.md)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the head and its report")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="time to train; 0 with --start only reports"
    )
    parser.add_argument("--start", type=Path, help="folder of a head to go on from")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the head can say")
    parser.add_argument("--tokens-per-file", type=int, default=150_000, help="most tokens of one file")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    model = str(prepare_embedded_model(print))
    rng = np.random.default_rng(options.seed)
    torch.manual_seed(options.seed)
    learn: list[Window] = []
    judge: dict[str, list[Window]] = {}
    counts: Counter[int] = Counter()
    for file in options.traces:
        trajectories = load_tokens(file, model)
        mine = list(windows(select_part(trajectories, "tune")))
        rng.shuffle(mine)  # type: ignore[arg-type]
        learn += _at_most(mine, options.tokens_per_file)
        judge[file.name.partition(".")[0]] = _at_most(
            list(windows(select_part(trajectories, "test"))), 12_000
        )
        for window in mine:
            counts.update(window.ids[window.generated].tolist())
    tokens = sum(len(window.ids) for window in learn)
    print(f"{len(learn)} windows, {tokens} tokens, {sum(int(w.generated.sum()) for w in learn)} generated")

    trainer = Trainer(model, options.draft_vocab, counts, options.rate)
    said = sum(counts[int(token)] for token in trainer.draft_ids) / counts.total()
    print(f"{said:.1%} of the generated tokens are in the draft vocabulary")
    if options.start:
        trainer.draft_ids = trainer.head.load(options.start)
        trainer.to_draft.fill_(-1)[trainer.draft_ids] = torch.arange(options.draft_vocab)
    curve: list[tuple[int, float]] = []
    begin, seen, recent = time.monotonic(), 0, 0.0
    budget = options.minutes * 60
    while time.monotonic() - begin < budget:
        rng.shuffle(learn)  # type: ignore[arg-type]
        # Windows of similar length in a batch, batches in random order: little padding.
        order = sorted(range(len(learn)), key=lambda i: (len(learn[i].ids) // 64, rng.random()))
        batches = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(batches)  # type: ignore[arg-type]
        for chosen in batches:
            done = (time.monotonic() - begin) / budget
            if done >= 1.0:
                break
            loss = trainer.step([learn[i] for i in chosen], done)
            seen += sum(len(learn[i].ids) for i in chosen)
            recent = 0.95 * recent + 0.05 * loss if recent else loss
            if not curve or seen - curve[-1][0] > 20_000:
                curve.append((seen, round(recent, 4)))
                print(f"{done:6.1%}  {seen / tokens:5.2f} epochs  loss {recent:.3f}", flush=True)
    if seen:
        trainer.head.save(options.out, trainer.config, trainer.draft_ids)
    accepted = {name: trainer.acceptance(chosen) for name, chosen in judge.items()}
    report = {
        "tokens": tokens, "epochs": round(seen / tokens, 2), "minutes": options.minutes,
        "draft_vocab": options.draft_vocab, "in_draft_vocabulary": round(said, 4),
        "loss_by_tokens_seen": curve, "acceptance_by_position": accepted,
        "parameters": sum(p.numel() for p in trainer.head.parameters()),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, values in accepted.items():
        print(f"{name:20} " + " ".join(f"{value:.2f}" for value in values))


def _at_most(chosen: list[Window], tokens: int) -> list[Window]:
    kept, total = [], 0
    for window in chosen:
        if total + len(window.ids) > tokens and kept:
            break
        kept.append(window)
        total += len(window.ids)
    return kept


if __name__ == "__main__":
    main()
