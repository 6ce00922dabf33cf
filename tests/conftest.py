"""Shared fixtures: a tiny random target, tiny random draft heads, and a drafter that knows the continuation."""

import importlib.util
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test touches the network
# nor the user's own cache: the engine is compiled once for all of them, and composed configurations are kept here
os.environ.setdefault("ENTMTP_CACHE", str(Path(__file__).resolve().parents[1] / ".tools" / "test-cache"))

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import settings

from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.engine import Decoder
from entmtp.heads.drafter import make_drafter
from entmtp.heads.model import DraftHeads, HeadsFormat
from entmtp.heads.prefix import prefix_like
from entmtp.heads.text import BatchDecoder
from entmtp.target.fetch import fetch_target
from entmtp.target.load import load_target
from entmtp.tree.defaults import DEFAULT_TREES
from entmtp.tree.topology import Tree

torch.set_num_threads(1)
settings.register_profile("entmtp", database=None, deadline=None, derandomize=True, max_examples=40)
settings.load_profile("entmtp")

DEPTH, WIDTH, DRAFT_VOCAB = 4, 16, 100


def pytest_sessionstart(session) -> None:
    """What pipeline tests share in the checkout is made once, before there are workers that would make it at once, and
    again where this code makes another."""
    if hasattr(session.config, "workerinput"):
        return
    folder = Path(__file__).resolve().parents[1] / "resources" / "targets" / "tiny"
    with tempfile.TemporaryDirectory() as work:
        made = fetch_target(TargetConfig(name="tiny", source="random"), Path(work) / "tiny")
        content = [{path.name: path.read_bytes() for path in of.glob("*")} for of in (made, folder)]
        if content[0] != content[1]:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which plain runs do without
def pytest_xdist_make_scheduler(config, log):
    from groups import group_of
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


class OracleDrafter:
    """Drafts a known continuation: at each position and depth the true token sits at a seeded rank, or nowhere.

    It reads the position from the decoder's cache, so it also asserts that every root is the text's own token.
    """

    arch, history = "hydra", False

    def __init__(self, depth: int = DEPTH, width: int = WIDTH, wrong: float = 0.2, seed: int = 0, top: int = 3):
        self.depth, self.width, self.wrong, self.seed, self.top = depth, width, wrong, seed, top

    def attach(self, decoder: Decoder, prompt: list[int], text: list[int]) -> "OracleDrafter":
        self.cache, self.offset, self.text = decoder.cache, len(prompt), text
        self.vocab = decoder.target.vocab_size
        return self

    def _rng(self, depth: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.at, depth])

    def hit(self, depth: int) -> int | None:
        """Rank that carries the true token `depth` places after the root; None: no candidate does."""
        rng = self._rng(depth)
        return None if rng.random() < self.wrong else int(rng.integers(self.top))

    def reserve(self, capacity: int) -> None:
        pass

    def reset(self) -> None:
        pass

    def start(self, hidden: torch.Tensor, root: int) -> None:
        self.at, self.root = self.cache.length - self.offset, root
        assert root == self.text[self.at], "the root is not the text's token at this position"

    def extend(self, depth: int) -> None:
        pass

    def greedy_probs(self, depth: int) -> torch.Tensor:
        return torch.tensor([self._rng(100 + d).random() ** 0.3 for d in range(1, depth + 1)])

    def fill(self, compiled) -> torch.Tensor:
        tree, tokens = compiled.tree, [self.root]
        for path in tree.paths:
            place = self.at + len(path)
            true = self.text[place] if place < len(self.text) else 0
            hit = self.hit(len(path))
            # other ranks carry tokens that differ from the true one and from each other
            tokens.append(true if path[-1] == hit else (true + 1 + path[-1]) % self.vocab)
        return torch.tensor(tokens)


def make_heads(target, arch: str, tokens: list[int], seed: int = 0, blocks: int = 1) -> DraftHeads:
    """Random heads; the draft vocabulary holds `tokens` (the likely ones) first."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randperm(target.vocab_size, generator=generator).tolist()
    token_map = torch.tensor(list(dict.fromkeys(tokens + rest))[:DRAFT_VOCAB])
    form = HeadsFormat(
        "medusa" if arch == "medusa" else "hydra", DEPTH, blocks, target.hidden_size, DRAFT_VOCAB, target.fingerprint,
        embedding_scale=1.5, prefix=asdict(prefix_like(target.config)) if arch == "hydra_plus" else None,
    )  # fmt: skip
    heads = DraftHeads(form, token_map)
    heads.reset(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.15
    return heads.eval()


def random_tree(rng: np.random.Generator, depth: int = DEPTH, ranks: int = 4, nodes: int = 12) -> Tree:
    """A random prefix-closed tree of at most `nodes` nodes."""
    paths: set[tuple[int, ...]] = set()
    for _ in range(int(rng.integers(0, nodes + 1))):
        parents = [()] + [path for path in sorted(paths) if len(path) < depth]
        paths.add((*parents[int(rng.integers(len(parents)))], int(rng.integers(ranks))))
    return Tree.of(paths)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return fetch_target(TargetConfig(name="tiny", source="random"), tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    return load_target(TargetConfig(name="tiny", source="random"), tiny_folder, "float32")


@pytest.fixture(scope="session")
def tiny_bf16(tiny_folder):
    return load_target(TargetConfig(name="tiny", source="random"), tiny_folder, "bfloat16")


@pytest.fixture(scope="session")
def prompts(tiny) -> list[list[int]]:
    """Token ids of several lengths, one of them a single token."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, tiny.vocab_size, size).tolist() for size in (1, 4, 9, 23)]


@pytest.fixture(scope="session")
def greedy_texts(tiny, prompts) -> list[list[int]]:
    decoder = Decoder(tiny, None, 128)
    return [decoder.plain(prompt, DecodingConfig(max_new_tokens=48)).tokens for prompt in prompts]


@pytest.fixture(scope="session")
def tiny_heads(tiny, greedy_texts) -> dict[str, DraftHeads]:
    tokens = [token for text in greedy_texts for token in text]
    return {arch: make_heads(tiny, arch, tokens) for arch in ("medusa", "hydra", "hydra_plus")}


@pytest.fixture(scope="session")
def drafters(tiny, tiny_heads) -> dict:
    return {arch: make_drafter(heads, tiny, WIDTH) for arch, heads in tiny_heads.items()}


@pytest.fixture(scope="session")
def trees() -> dict[str, Tree]:
    """Empty, chain, wide, published and random trees."""
    found = dict(DEFAULT_TREES)
    found["wide"] = Tree.of([(rank,) for rank in range(8)])
    found["full"] = Tree.of([(a,) for a in range(5)] + [(a, b) for a in range(5) for b in range(5)])
    rng = np.random.default_rng(3)
    found |= {f"random_{number}": random_tree(rng) for number in range(4)}
    return found


@pytest.fixture(scope="session")
def oracle() -> type[OracleDrafter]:
    return OracleDrafter


@pytest.fixture(scope="session")
def tree_maker():
    return random_tree


@pytest.fixture(scope="session")
def heads_maker():
    return make_heads


@pytest.fixture(scope="session")
def module_at():
    """module_at(path): a module that lies outside of the package."""

    def load(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def interrupted_batches(monkeypatch):
    """with interrupted_batches(5): whoever generates text in batches is interrupted after five texts."""

    @contextmanager
    def after(count: int):
        original = BatchDecoder.run

        def stopping(self, source, *args):
            for number, sequence in enumerate(original(self, source, *args)):
                if number == count:
                    raise KeyboardInterrupt
                yield sequence

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BatchDecoder, "run", stopping)
            yield

    return after


class Traced:
    """Live texts of one kind of heads in one mode, their trace rows and the trace."""

    def __init__(self, target, drafter, prompts, decoding: DecodingConfig):
        from entmtp.calibration.replay import Trace
        from entmtp.calibration.traces import trace_text
        from entmtp.decoding.engine import make_chooser

        self.target, self.drafter, self.decoding = target, drafter, decoding
        self.prompts = [{"id": f"p{number}", "token_ids": prompt} for number, prompt in enumerate(prompts)]
        self.decoder = Decoder(target, drafter, 160)
        self.texts, self.rows = {}, []
        for prompt in self.prompts:
            text = self.decoder.plain(prompt["token_ids"], decoding, prompt["id"]).tokens
            chooser = make_chooser(target, decoding, prompt["id"])
            self.texts[prompt["id"]] = text
            self.rows += trace_text(
                target, drafter, self.decoder.cache, prompt["id"], prompt["token_ids"], text, chooser
            )
        self.frame = pd.DataFrame(self.rows)
        self.trace = Trace.from_frame(self.frame)

    def live(self, policy) -> list:
        """One Generation a prompt."""
        return [
            self.decoder.generate(prompt["token_ids"], policy, self.decoding, prompt["id"]) for prompt in self.prompts
        ]


@pytest.fixture(scope="session")
def traced(tiny, drafters, prompts):
    """traced(arch, mode, stop): cached; `stop` makes a token of the texts a stop id, so that they end early."""
    known = {}

    def make(arch: str = "hydra", mode: str = "greedy", stop: bool = False) -> Traced:
        key = arch, mode, stop
        if key not in known:
            decoding = DecodingConfig(mode=mode, max_new_tokens=40, temperature=0.8, seed=3)
            target = tiny
            if stop:
                tokens = [token for text in make(arch, mode).texts.values() for token in text[8:20]]
                target = replace(tiny, stop_ids={max(set(tokens), key=tokens.count)})
            known[key] = Traced(target, drafters[arch], prompts, decoding)
        case = known[key]
        case.drafter.reserve(case.decoder.capacity)  # drafters are shared: another test's decoder may have less room
        return case

    return make
