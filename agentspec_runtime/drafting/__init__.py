"""Pure core: drafts out of an agent's own text. Start at `drafter.Drafter`."""

from agentspec_runtime.drafting.draft import (
    BLOCK_KINDS,
    SOURCES,
    BatchDraft,
    BlockSpan,
    Draft,
    DraftingConfig,
    DraftScope,
    Observed,
)
from agentspec_runtime.drafting.drafter import BatchObserved, Drafter
from agentspec_runtime.drafting.vocabulary import TokenTable

__all__ = [
    "BLOCK_KINDS",
    "SOURCES",
    "BatchDraft",
    "BatchObserved",
    "BlockSpan",
    "Draft",
    "DraftScope",
    "Drafter",
    "DraftingConfig",
    "Observed",
    "TokenTable",
]
