"""What tests, benchmarks and the demo share: problems, scalar loops, composites, comparison.

cases.py      small named problems, each stressing one axis
workloads.py  the problems of real models
loops.py      the operators as scalar loops, with their gradients
composite.py  the operators in plain PyTorch, as people write them today
compare.py    comparison within an error budget
running.py    one way to run any of these writings
"""

from pliant.testing.cases import CASES, DIFFERENTIABLE, OPERATORS, POSITIONS, Case
from pliant.testing.compare import check, worst
from pliant.testing.running import Expected, expect, impls, incoming, run, verify
from pliant.testing.workloads import WORKLOADS, workload

__all__ = [
    "CASES",
    "DIFFERENTIABLE",
    "OPERATORS",
    "POSITIONS",
    "WORKLOADS",
    "Case",
    "Expected",
    "check",
    "expect",
    "impls",
    "incoming",
    "run",
    "verify",
    "workload",
    "worst",
]
