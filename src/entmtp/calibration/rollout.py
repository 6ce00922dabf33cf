"""The paper's own way to score trees: live runs of the target. Slow; the judge of replay."""

from collections import Counter

from entmtp.config import DecodingConfig
from entmtp.decoding.engine import Decoder
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree


class LiveObserver:
    """Accepted rank paths of a tree's run, for the greedy search: by decoding every prompt with that tree."""

    def __init__(self, decoder: Decoder, prompts: list[dict], decoding: DecodingConfig):
        self.decoder, self.prompts, self.decoding = decoder, prompts, decoding

    def observe(self, tree: Tree) -> Counter:
        """Counter of accepted paths, one a step; () when nothing was accepted."""
        paths: Counter = Counter()
        policy = Policy("rollout", [tree])
        for number, prompt in enumerate(self.prompts, 1):
            run = self.decoder.generate(prompt["token_ids"], policy, self.decoding, prompt["id"])
            paths.update(tree.paths[step.node - 1] if step.node else () for step in run.steps)
            print(f"rollout: {tree.num_nodes} nodes, prompt {number}/{len(self.prompts)}", flush=True)
        self.decoder.compiled.pop(tree)  # a search sees each union tree once
        return paths
