"""A greedy step that stays on the device: drafting, verifying, accepting, committing and the next position's signals
are one sequence of operators of fixed shapes, after which the host reads one small vector. That is the only wait.

On CUDA the sequence of each topology is captured once as a graph, and switching trees is replaying another one.
Elsewhere the same operators run one by one; that is how they are tested without a GPU.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from entmtp.decoding.steps import Round, Step, decode_steps
from entmtp.heads.drafter import Drafter, top1_prob
from entmtp.policy.schedulers import Policy
from entmtp.target.cache import KVCache, mask_at
from entmtp.tree.compiled import CompiledTree

WARM_UP = 3  # runs before a capture: libraries choose kernels and allocate in them


class Verdict:
    """Exact acceptance of one tree's tokens as tensor operators."""

    def __init__(self, compiled: CompiledTree, span: int, device: str):
        tree, n = compiled.tree, compiled.n
        self.depths = compiled.depths  # [n]
        self.parents = torch.tensor([0, *tree.parents[1:]], device=device)
        self.ancestors = torch.from_numpy(tree.ancestors()).to(device)  # [n, n]
        paths = [tree.path_nodes(node) for node in range(n)]
        # nodes from the root to every node, which repeats itself to the end: [n, span]
        self.paths = torch.tensor([path + path[-1:] * (span - len(path)) for path in paths], device=device)

    def __call__(self, tokens: Tensor, choices: Tensor) -> Tensor:
        """The deepest node [1] whose path consists of the target's `choices` [n] after each node; as accept_exact."""
        wrong = tokens != choices[self.parents]
        wrong[:1] = False  # the root was chosen by the target before
        rejected = (self.ancestors & wrong).any(dim=1)
        return torch.where(rejected, -1, self.depths).argmax(dim=0, keepdim=True)


class DeviceLoop:
    """Steps with any of `trees`, in the buffers of `cache` and `drafter`; `look` is the policy's depth.

    A step reads and writes the same tensors every time: `root` [1], `length` [1] (rows of the cache), what the drafter
    carries from one step to the next, and `report`: deepest accepted node, number of committed tokens, these tokens,
    the next root, path values s_0..s_look.
    """

    def __init__(
        self,
        target,
        drafter: Drafter | None,
        cache: KVCache,
        trees: list[CompiledTree],
        look: int | None,
        base: bool,
    ):
        self.target, self.cache, self.trees, self.look, self.base = target, cache, trees, look, base
        self.drafter = drafter if look is not None or any(tree.n > 1 for tree in trees) else None
        self.span = 1 + max(tree.tree.depth for tree in trees)
        self.verdicts = [Verdict(tree, self.span, target.device) for tree in trees]
        self.root, self.length = (torch.zeros(1, dtype=torch.long, device=target.device) for _ in range(2))
        values = 0 if look is None else look + 1
        # float64 holds token ids exactly, so that one vector carries everything
        self.report = torch.zeros(3 + self.span + values, dtype=torch.float64, device=target.device)
        self.carry: list[Tensor] | None = None
        self.graphs: list[torch.cuda.CUDAGraph] = []

    @torch.inference_mode()
    def begin(self, prompt: list[int]) -> tuple[int, list[float]]:
        """Prefill. Returns the first root and the path values there. The first call captures the graphs."""
        hidden = self.target.prefill(prompt, self.cache)
        logits = self.target.model.logits(hidden[-1:])
        root = logits.argmax(dim=-1)
        if self.drafter is not None:
            self.drafter.reset()
            self.drafter.start(hidden, int(root))
        values, carried = self._signals(logits)
        if self.carry is None:
            self.carry = [tensor.clone() for tensor in carried]
            self._set(root, len(prompt), carried)
            if self.target.device.startswith("cuda"):
                try:
                    self._capture(root, len(prompt), carried)
                except BaseException:  # the next text captures anew
                    self.carry, self.graphs = None, []
                    raise
        self._set(root, len(prompt), carried)
        return int(root), values.tolist()

    def _set(self, root: Tensor, length: int, carried: list[Tensor]) -> None:
        self.root.copy_(root)
        self.length.fill_(length)
        if self.drafter is not None and self.drafter.prefix is not None:
            self.drafter.prefix.length.fill_(length)
        for buffer, tensor in zip(self.carry, carried, strict=True):
            buffer.copy_(tensor)

    def _capture(self, root: Tensor, length: int, carried: list[Tensor]) -> None:
        """A graph a tree. Not run on a GPU yet (README, limits)."""
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        for index in range(len(self.trees)):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):  # each from the same state, so that the text's room suffices
                    self._set(root, length, carried)
                    self._run(index)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._run(index)
            self.graphs.append(graph)

    @torch.inference_mode()
    def step(self, index: int) -> tuple[int, list[int], int, list[float]]:
        """One round with trees[index]: deepest accepted node, committed tokens, next root, next path values."""
        if self.graphs:
            self.graphs[index].replay()
        else:
            self._run(index)
        node, count, *rest = self.report.tolist()  # the wait
        tokens = [int(token) for token in rest[: int(count)]]
        self.cache.length += len(tokens)
        return int(node), tokens, int(rest[self.span]), rest[self.span + 1 :]

    def _run(self, index: int) -> None:
        tree, verdict, model = self.trees[index], self.verdicts[index], self.target.model
        tokens = self.root
        if self.drafter is not None:
            self.drafter.resume(self.carry)
            tokens = self.drafter.fill(tree)
        rows = self.length + torch.arange(tree.n, device=self.length.device)
        # drafts past the model's last position can be proposed near the end, never committed
        positions = (self.length + tree.depths).clamp_max(self.target.max_positions - 1)
        mask = mask_at(tree.block, rows, self.length, self.cache.capacity, self.target.mask_rows)
        hidden = model.hidden_at(tokens, positions, rows, self.cache, mask)
        logits = model.logits(hidden)
        choices = logits.argmax(dim=-1)
        node = verdict(tokens, choices)
        path, count, root = verdict.paths[node][0], verdict.depths[node] + 1, choices[node]
        self.cache.commit_at(self.length, path)
        if self.drafter is not None:
            self.drafter.start_at(hidden[path], count, root)
        values, carried = self._signals(logits[node])
        self.report.copy_(torch.cat([torch.cat([node, count, tokens[path], root]).double(), values.double()]))
        self.root.copy_(root)
        self.length += count
        for buffer, tensor in zip(self.carry, carried, strict=True):
            buffer.copy_(tensor)

    def _signals(self, logits: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Path values s_0..s_look (none without `look`) of the position that the drafter has started at, and what it
        carries on. logits [1, V] of the last committed token."""
        if self.drafter is None:
            return torch.empty(0, device=logits.device), []
        if self.look is None:
            return torch.empty(0, device=logits.device), self.drafter.carried()
        base = top1_prob(logits) if self.base else torch.ones(1, device=logits.device)
        heads = [self.drafter.greedy_probs(self.look)] if self.look else []
        return torch.cat([base, *heads]).double().cumprod(dim=0), self.drafter.carried()

    def stream(self, prompt: list[int], policy: Policy, stop: set[int], budget: int) -> Iterator[Step | None]:
        """As Decoder.stream. Signals are computed in the step before: a step's scheduling time is choice and switch."""
        first, values = self.begin(prompt)
        yield None

        def take(root: int) -> Round:
            nonlocal values
            begin = time.perf_counter()
            index, signal = policy.decide(values), values[-1] if values else float("nan")
            scheduler, tree = time.perf_counter() - begin, self.trees[index]
            node, tokens, following, values = self.step(index)
            return Round(index, tree.n - 1, tree.tree.path_nodes(node), tokens, signal, scheduler, scheduler, following)

        yield from decode_steps(first, take, policy, stop, budget)
