"""The step loop: propose -> verify -> commit, with a policy that picks the tree of every step.

Batch size is 1: a step's tree is one sequence's; batches would need ragged trees and caches.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from entmtp.config import DecodingConfig
from entmtp.decoding.on_device import DeviceLoop
from entmtp.decoding.plain import plain_tokens
from entmtp.decoding.processors import ProcessedChooser, Processor
from entmtp.decoding.sampling import Choices, Chooser, GumbelNoise, refuse_nan
from entmtp.decoding.steps import Generation, Round, Step, decode_steps
from entmtp.decoding.verify import accept_exact, accept_typical
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import Drafter, top1_prob
from entmtp.heads.grow import Nursery, grow
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import Policy
from entmtp.tree.compiled import CompiledTree
from entmtp.tree.grown import GrownTree
from entmtp.tree.topology import Tree


class Decoder:
    """A target, its draft heads and their compiled trees, with one KV cache reused for every prompt.

    `capacity` positions must hold prompt, new tokens and the largest tree; `room` computes it.
    """

    def __init__(self, target, drafter: Drafter | None, capacity: int):
        self.target, self.drafter, self.capacity = target, drafter, capacity
        self.cache = target.new_cache(capacity)
        if drafter is not None:
            drafter.reserve(capacity)
        self.compiled: dict[Tree, CompiledTree] = {}
        self.nurseries: dict[int, Nursery] = {}  # of growing policies, by their id
        self.graphs = target.device.startswith("cuda")  # whether steps that can do so stay on the device
        self.loops: dict[object, DeviceLoop] = {}

    @staticmethod
    def room(prompt_tokens: int, max_new_tokens: int, max_nodes: int) -> int:
        """Cache rows that a text needs when a step drafts at most `max_nodes` nodes."""
        return prompt_tokens + max_new_tokens + max_nodes + 1

    def compile(self, tree: Tree) -> CompiledTree:
        """The tree's tensors, made at first use (before decoding: a switch is then an index)."""
        if tree not in self.compiled:
            if tree.num_nodes and self.drafter is None:
                raise EntmtpError("a non-empty draft tree needs draft heads")
            if tree.num_nodes:
                tree.check_fits(self.drafter.depth, self.drafter.width)
            self.compiled[tree] = CompiledTree(
                tree, self.target.mask_rows, self.capacity, self.target.dtype, self.target.device
            )
        return self.compiled[tree]

    def check(self, prompt: list[int], max_new_tokens: int, max_nodes: int) -> None:
        check_prompt(self.target, prompt, max_new_tokens)
        need = self.room(len(prompt), max_new_tokens, max_nodes)
        if need > self.capacity:
            raise EntmtpError(f"this run needs {need} cache rows, the decoder has {self.capacity}")

    def plain(self, prompt: list[int], decoding: DecodingConfig, prompt_id: str = "") -> Generation:
        """Plain decoding, timed the same way as `generate`."""
        if self._stays_on_device(decoding):
            return self.generate(prompt, Policy("ar", [Tree(())]), decoding, prompt_id)
        self.check(prompt, decoding.max_new_tokens, 0)
        chooser = make_chooser(self.target, decoding, prompt_id)
        start = time.perf_counter()
        stream = plain_tokens(self.target, self.cache, prompt, decoding.max_new_tokens, chooser)
        tokens, steps, last = [next(stream)], [], time.perf_counter()
        prefill_end = last
        for token in stream:
            now = time.perf_counter()
            steps.append(Step(0, 0, 0, 0, float("nan"), now - last, 0.0, 0.0, [tokens[-1]]))
            tokens.append(token)
            last = now
        return Generation(tokens, prefill_end - start, last - prefill_end, steps)

    def generate(self, prompt: list[int], policy: Policy, decoding: DecodingConfig, prompt_id: str = "") -> Generation:
        """Decode one prompt under `policy`. Exact modes give the very tokens of `plain`."""
        start = time.perf_counter()
        stream = self.stream(prompt, policy, decoding, prompt_id)
        tokens, steps = [], []
        prefill_end = start
        for step in stream:
            if step is None:
                prefill_end = time.perf_counter()
                continue
            tokens.extend(step.tokens)
            steps.append(step)
        end = time.perf_counter()
        if steps and steps[-1].nodes < 0:  # the last root was committed without a forward
            steps.pop()
        return Generation(tokens, prefill_end - start, end - prefill_end, steps)

    @torch.inference_mode()
    def stream(
        self,
        prompt: list[int],
        policy: Policy,
        decoding: DecodingConfig,
        prompt_id: str = "",
        *,
        stop_ids: set[int] | None = None,
        processors: Sequence[Processor] = (),
    ) -> Iterator[Step | None]:
        """Yield None after the prefill, then every step as it commits its tokens.

        A last root that needs no forward (a stop token, or the budget's last token) comes as a Step with nodes -1.
        `stop_ids` replace the target's own. `processors` are pure functions (decoding/processors.py).
        """
        target, cache, budget = self.target, self.cache, decoding.max_new_tokens
        stop = target.stop_ids if stop_ids is None else stop_ids
        self.check(prompt, budget, policy.max_nodes)
        self._check_policy(policy)
        trees = [self.compile(tree) for tree in policy.trees]
        policy.reset()
        cache.reset()
        if self._stays_on_device(decoding, policy, processors):
            yield from self._loop(policy).stream(prompt, policy, stop, budget)
            return
        chooser = make_chooser(target, decoding, prompt_id, processors, prompt)
        if self.drafter is not None:
            self.drafter.reset()
        hidden = target.prefill(prompt, cache)  # from here on: the rows committed since the drafter last looked
        logits = target.model.logits(hidden[-1:])
        first = chooser(logits, [len(prompt)])[0]
        yield None

        def take(root: int) -> Round:
            nonlocal hidden, logits
            if isinstance(policy, GrowingPolicy):
                signal, index, tree, scheduler, switch = self._grow(policy, hidden, root)
            else:
                signal, index, tree, scheduler, switch = self._schedule(policy, trees, hidden, logits, root)
            nodes, tokens, hidden, logits, following = self._verify(tree, root, chooser, decoding)
            accepted = [tokens[node] for node in nodes]
            return Round(index, tree.n - 1, nodes, accepted, signal, scheduler, switch, following)

        yield from decode_steps(first, take, policy, stop, budget)

    def _stays_on_device(
        self, decoding: DecodingConfig, policy: Policy | None = None, processors: Sequence[Processor] = ()
    ) -> bool:
        """Whether DeviceLoop covers this run; the loop below covers everything."""
        static = not isinstance(policy, GrowingPolicy) and not processors and decoding.mode == "greedy"
        return self.graphs and static and hasattr(self.target.model, "hidden_at")

    def _loop(self, policy: Policy) -> DeviceLoop:
        key = tuple(policy.trees), policy.depth, policy.base
        if key not in self.loops:
            trees = [self.compile(tree) for tree in policy.trees]
            self.loops[key] = DeviceLoop(self.target, self.drafter, self.cache, trees, policy.depth, policy.base)
        return self.loops[key]

    def _check_policy(self, policy: Policy) -> None:
        have = self.drafter.depth if self.drafter else 0
        if policy.depth is not None and (self.drafter is None or policy.depth > have):
            raise EntmtpError(
                f"policy {policy.name}: path value of depth {policy.depth}, but there are {have} draft heads"
            )
        if isinstance(policy, GrowingPolicy):
            if policy.max_depth > have:
                raise EntmtpError(
                    f"policy {policy.name}: max_depth={policy.max_depth}, but there are {have} draft heads"
                )
            if policy.children > self.drafter.width:
                raise EntmtpError(
                    f"policy {policy.name}: children={policy.children} exceeds heads.width={self.drafter.width}"
                )
            if id(policy) not in self.nurseries:  # made before decoding; it holds the policy, so the id stays taken
                self.nurseries[id(policy)] = Nursery(
                    policy, self.target.mask_rows, self.capacity, self.target.dtype, self.target.device
                )

    def _grow(self, policy: GrowingPolicy, hidden: Tensor, root: int) -> tuple[float, int, GrownTree, float, float]:
        """As `_schedule`, for a policy that grows its tree: the scheduler's time is all but the heads' own."""
        self.drafter.start(hidden, root)
        tree, seconds = grow(self.drafter, root, self.nurseries[id(policy)])
        return float("nan"), tree.n - 1, tree, seconds, seconds  # a grown tree goes by its size

    def _schedule(
        self, policy: Policy, trees: list[CompiledTree], hidden: Tensor, logits: Tensor, root: int
    ) -> tuple[float, int, CompiledTree, float, float]:
        """The deepest path value of this position, the tree's index, the tree, and two times in seconds: signal, choice
        and switch together; choice and switch alone.

        The heads' forward along the greedy path is part of proposing and is not counted as scheduling.
        """
        if policy.depth is not None or any(tree.n > 1 for tree in trees):  # a signal needs the heads too
            self.drafter.start(hidden, root)
        if policy.depth is not None:
            self.drafter.extend(policy.depth)
        begin = time.perf_counter()
        values = [] if policy.depth is None else self._path_values(policy, logits)
        known = time.perf_counter()
        index = policy.decide(values)
        tree = trees[index]
        end = time.perf_counter()
        return values[-1] if values else float("nan"), index, tree, end - begin, end - known

    def _path_values(self, policy: Policy, logits: Tensor) -> list[float]:
        """s_0..s_depth (DESIGN 3): the base top-1 probability (1 for a policy that does not look at it), times the
        heads' along the greedy path one by one. logits [1, V]."""
        base = float(top1_prob(logits)) if policy.base else 1.0
        heads = self.drafter.greedy_probs(policy.depth).tolist() if policy.depth else []
        return list(accumulate([base, *heads], mul))

    def _verify(self, tree: CompiledTree | GrownTree, root: int, chooser: Chooser, decoding: DecodingConfig):
        """Draft, one target forward, acceptance, commit.

        Returns accepted nodes, all tokens, the hidden states [k, H] that the drafter needs of the accepted nodes (the
        last one, or all of them), the logits [1, V] after the last accepted node, and the next root.
        """
        drafted = self.propose(tree, root)
        all_hidden, all_logits = self.forward(tree, drafted)
        tokens = drafted.tolist()
        nodes, root = self.accept(tree, tokens, all_logits, chooser, decoding)
        self.cache.commit(nodes)
        last = slice(nodes[-1], nodes[-1] + 1)
        history = self.drafter is not None and self.drafter.history and len(nodes) > 1
        return nodes, tokens, all_hidden[nodes if history else last], all_logits[last], root

    def propose(self, tree: CompiledTree | GrownTree, root: int) -> Tensor:
        """Token ids [n] of the tree's nodes, root first. The drafter has started at this position."""
        if isinstance(tree, GrownTree):
            return tree.tokens
        if tree.n == 1:
            return torch.tensor([root], device=self.target.device)
        return self.drafter.fill(tree)

    def forward(self, tree: CompiledTree | GrownTree, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """The target's hidden states [n, H] and logits [n, V] of the drafted nodes."""
        # drafts past the model's last position can be proposed near the end, never committed
        positions = (tree.depths + self.cache.length).clamp_max(self.target.max_positions - 1)
        hidden = self.target.model.hidden(drafted, positions, self.cache, tree.mask_slice(self.cache.length))
        return hidden, self.target.model.logits(hidden)

    def accept(
        self,
        tree: CompiledTree | GrownTree,
        tokens: list[int],
        logits: Tensor,
        chooser: Chooser,
        decoding: DecodingConfig,
    ) -> tuple[list[int], int]:
        """Nodes to commit, root first, and the next root."""
        if decoding.mode == "typical":
            nodes = accept_typical(tree.tree, tokens, logits, decoding.temperature, decoding.epsilon, decoding.alpha)
            root = int(logits[nodes[-1]].argmax())  # Medusa: the root itself is greedy
            refuse_nan(logits[nodes[-1] :], root)
            return nodes, root
        positions = [self.cache.length + depth + 1 for depth in tree.tree.depths]
        # one by one where a look at the logits is cheap, all at once where it means to wait for a device
        on_cpu = logits.device.type == "cpu"
        choices = Choices(chooser, logits, positions) if on_cpu else chooser(logits, positions)
        nodes = accept_exact(tree.tree, tokens, choices)
        return nodes, choices[nodes[-1]]


def check_prompt(target, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse what `target` cannot read, or has no positions for."""
    if not prompt or not isinstance(prompt[0], int):
        raise EntmtpError("the prompt must be one non-empty list of token ids (batch size 1 only)")
    target.check_tokens(prompt)
    target.check_room(len(prompt), max_new_tokens)


def make_chooser(
    target,
    decoding: DecodingConfig,
    prompt_id: str,
    processors: Sequence[Processor] = (),
    prompt: Sequence[int] = (),
) -> Chooser:
    """greedy and typical choose by argmax; sample by Gumbel-max with the prompt's own noise. `processors` change the
    scores before that; they need the text from its `prompt` on."""
    temperature, noise = 0.0, None
    if decoding.mode == "sample":
        temperature = decoding.temperature
        noise = GumbelNoise(decoding.seed, prompt_id, target.vocab_size, target.device)
    if not processors:
        return Chooser(temperature, noise)
    if decoding.mode == "typical":
        raise EntmtpError("typical acceptance judges the target's own probabilities: it takes no logits processors")
    return ProcessedChooser(processors, prompt, temperature, noise)
