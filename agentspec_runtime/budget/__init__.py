"""Pure core: how many tokens to draft for whom. Start at `policy.GoodputBudget`."""

from agentspec_runtime.budget.cost import CostCurve, StepCost, StepShape
from agentspec_runtime.budget.policy import (
    LATENCY_WEIGHTS,
    AssistPrices,
    BudgetPolicy,
    FixedBudget,
    GoodputBudget,
    Load,
    Plan,
)

__all__ = [
    "LATENCY_WEIGHTS",
    "AssistPrices",
    "BudgetPolicy",
    "CostCurve",
    "FixedBudget",
    "GoodputBudget",
    "Load",
    "Plan",
    "StepCost",
    "StepShape",
]
