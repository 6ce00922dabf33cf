"""Answers of docs/faq.md that no other test gives, and that every test which the documents name exists."""

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from entmtp import custom_generate, generate, load
from entmtp.calibration import latency
from entmtp.calibration.latency_table import LatencyTable
from entmtp.calibration.throughput import predict
from entmtp.config import BankConfig, DecodingConfig, LatencyConfig, PolicyConfig
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.policy.fit import build_policy, fit_policy
from entmtp.policy.schedulers import Policy
from entmtp.provenance import provenance
from entmtp.tree.bank import Bank, build_bank
from entmtp.tree.topology import Tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("document", ["robustness.md", "faq.md", "library.md"])
def test_the_tests_that_documents_name_exist(document):
    text = (ROOT / "docs" / document).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert named
    for path, name in named:
        functions = {node.name for node in ast.parse((ROOT / path).read_text()).body
                     if isinstance(node, ast.FunctionDef)}  # fmt: skip
        assert not name or name in functions, f"{document}: {path}::{name}"


def test_nothing_private_of_transformers_is_imported():
    """Public names only, and the module whose names have moved before (the cache's) in one place."""
    where = {}
    for path in sorted((ROOT / "src/entmtp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                assert not any(part.startswith("_") for part in parts), f"{path}: {node.module}"
                where.setdefault(node.module, set()).add(path.name)
    assert where["transformers.cache_utils"] == {"generic.py"}


def test_a_generation_config_changes_no_text(tiny_folder, prompts):
    """Models ship penalties and temperatures in it. Through transformers' own hook they count, as it passes them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    lm = load(model, tokenizer=tokenizer)
    before = [generate(lm, prompt, max_new_tokens=30).tokens for prompt in prompts]
    model.generation_config.repetition_penalty = 1.9
    model.generation_config.temperature, model.generation_config.do_sample = 1.5, True
    changed = load(model, tokenizer=tokenizer)
    assert [generate(changed, prompt, max_new_tokens=30).tokens for prompt in prompts] == before
    ids = torch.tensor([prompts[2]])
    penalised = model.generate(ids, do_sample=False, temperature=None, max_new_tokens=30)
    hooked = model.generate(ids, do_sample=False, temperature=None, max_new_tokens=30,
                            custom_generate=custom_generate, entmtp=changed)  # fmt: skip
    assert torch.equal(penalised, hooked) and hooked[0, len(prompts[2]) :].tolist() != before[2]


def test_a_result_says_where_it_comes_from():
    made = provenance({"experiment": "smoke", "dtype": "float32"}, prompts_sha256={"t": "ab"})
    assert {"git", "config_sha256", "date", "python", "packages", "cpu", "cores", "dtype", "threads"} <= set(made)
    assert made["packages"]["torch"] and made["cpu"] and made["prompts_sha256"] == {"t": "ab"}
    assert made["config_sha256"] != provenance({"experiment": "smoke", "dtype": "bfloat16"})["config_sha256"]


def test_batches_are_refused_not_crashed(tiny, prompts):
    decoder = Decoder(tiny, None, 64)
    for batch in ([prompts[0], prompts[1]], [[5]]):
        with pytest.raises(EntmtpError, match="batch size 1 only"):
            decoder.generate(batch, Policy("ar", [Tree(())]), DecodingConfig(max_new_tokens=4))


def test_prices_are_those_of_the_contexts_that_were_asked_for(tiny, monkeypatch):
    cache = tiny.new_cache(200)
    monkeypatch.setattr(latency, "median_ms", lambda run, repeats: run() or float(cache.length))
    monkeypatch.setattr(tiny, "new_cache", lambda rows: cache)
    made = latency.forward_table(tiny, LatencyConfig(contexts=[40, 120], sizes=[1, 3], repeats=1))
    assert made == {"tokens": [1, 3], "ms": [80.0, 80.0]}


def test_where_drafting_does_not_pay_plain_decoding_is_chosen(traced):
    """A machine on which each node costs a whole step: the bank is the empty tree, and every fitted policy takes it."""
    trace = traced("hydra").trace
    slow = LatencyTable([1, 2, 65], [20.0, 40.0, 1300.0], [1, 16], [[1.0, 2.0]] * 4, 0.5, 20.0, "hydra")
    rows = predict([Tree(()), Tree.of([(0,)]), Tree.of([(0,), (0, 0)])], trace, slow)
    bank = Bank("t", "hydra", "predicted", build_bank(rows, BankConfig(basis="predicted")))
    assert [entry.tree.num_nodes for entry in bank.trees] == [0]
    for kind in ("star", "ladder", "tau"):
        fitted = fit_policy(PolicyConfig(name=kind, kind=kind), bank, trace, slow)
        policy = build_policy(fitted, bank)
        assert {policy.trees[policy.choose(s)].num_nodes for s in (0.0, 0.5, 1.0)} == {0}
