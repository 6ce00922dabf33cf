"""Published trees, by name."""

from entmtp.errors import EntmtpError
from entmtp.tree.topology import Tree

# `mc_sim_7b_63` of Medusa and Hydra, in its published order (FACTS 5)
_MC_SIM_7B_63 = """0 · 0,0 · 1 · 0,1 · 2 · 0,0,0 · 1,0 · 0,2 · 3 · 0,3 · 4 · 0,4 · 2,0 · 0,5 · 0,0,1 · 5 · 0,6 · 6 ·
0,7 · 0,1,0 · 1,1 · 7 · 0,8 · 0,0,2 · 3,0 · 0,9 · 8 · 9 · 1,0,0 · 0,2,0 · 1,2 · 0,0,3 · 4,0 · 2,1 · 0,0,4 · 0,0,5 ·
0,0,0,0 · 0,1,1 · 0,0,6 · 0,3,0 · 5,0 · 1,3 · 0,0,7 · 0,0,8 · 0,0,9 · 6,0 · 0,4,0 · 1,4 · 7,0 · 0,1,2 · 2,0,0 · 3,1 ·
2,2 · 8,0 · 0,5,0 · 1,5 · 1,0,1 · 0,2,1 · 9,0 · 0,6,0 · 0,0,0,1 · 1,6 · 0,7,0"""

# compares draft heads with one another, on every task and target alike
_FIXED_16 = """0 · 1 · 2 · 3 · 0,0 · 0,1 · 1,0 · 0,2 · 2,0 · 0,0,0 · 0,0,1 · 0,1,0 · 1,0,0 · 0,0,0,0 · 0,0,0,1 ·
0,0,1,0"""


def _parse(text: str) -> Tree:
    return Tree.of([int(rank) for rank in path.split(",")] for path in text.replace("\n", " ").split("·"))


DEFAULT_TREES = {
    "empty": Tree(()),
    "chain_4": Tree.of([(0,) * d for d in range(1, 5)]),
    "fixed_16": _parse(_FIXED_16),
    "mc_sim_7b_63": _parse(_MC_SIM_7B_63),
}


def default_tree(name: str) -> Tree:
    """A published tree by its name. Raises EntmtpError for an unknown one."""
    if name not in DEFAULT_TREES:
        raise EntmtpError(f"unknown tree '{name}': choose one of {', '.join(sorted(DEFAULT_TREES))}")
    return DEFAULT_TREES[name]
