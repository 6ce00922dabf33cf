"""Which drafted nodes survive: pure functions of a tree, its tokens and the target's answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from entmtp.tree.topology import Topology


def accept_exact(tree: Topology, tokens: list[int], choices: Sequence[int]) -> list[int]:
    """Nodes committed under exact acceptance, root first: the path whose every token is the target's own choice.

    `tokens` [n] are the tree's tokens, `choices` [n] the target's choice after each node (argmax, or Gumbel-max with
    the position's noise). Siblings carry different tokens, so the path is unique. The next root is
    `choices[nodes[-1]]`. Only choices along that path are looked at, from the root down.
    """
    nodes = [0]
    while True:
        choice = choices[nodes[-1]]
        for child in tree.children[nodes[-1]]:
            if tokens[child] == choice:
                nodes.append(child)
                break
        else:
            return nodes


def accept_typical(
    tree: Topology, tokens: list[int], logits: Tensor, temperature: float, epsilon: float, alpha: float
) -> list[int]:
    """Nodes committed under typical acceptance (Medusa, section 2.3.2), root first. Lossy.

    A drafted token is accepted when p > min(epsilon, alpha * exp(-H)), with p and the entropy H of
    softmax(logits / temperature) at its parent [n, vocab]. The longest accepted path wins; among equally long ones
    the likeliest, then the first in node order.
    """
    if tree.num_nodes == 0:
        return [0]
    log_p = (logits.float() / temperature).log_softmax(dim=-1)
    entropy = -(log_p.exp() * log_p).nansum(dim=-1)
    threshold = torch.clamp(alpha * (-entropy).exp(), max=epsilon).tolist()
    parents = torch.tensor(tree.parents[1:], device=logits.device)
    drafted = torch.tensor(tokens[1:], device=logits.device)
    node_log_p = [0.0, *log_p[parents, drafted].tolist()]
    total, best = [0.0] * len(tokens), (0, 0.0, 0)
    accepted = [True] + [False] * tree.num_nodes
    for node, parent in enumerate(tree.parents[1:], 1):
        p = torch.exp(torch.tensor(node_log_p[node])).item()
        accepted[node] = accepted[parent] and p > threshold[parent]
        total[node] = total[parent] + node_log_p[node]
        if accepted[node]:
            best = max(best, (tree.depths[node], total[node], -node))
    return tree.path_nodes(-best[2])
