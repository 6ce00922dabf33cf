"""The harness' interface to our decoding, with and without lm-evaluation-harness itself."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import entmtp.lm_eval as lm_eval_module
from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.confadapt import BlockDecoder, BlockRule
from entmtp.decoding.engine import Decoder
from entmtp.errors import EntmtpError
from entmtp.lm_engines import BlockEngine, TreeEngine, open_engine
from entmtp.lm_eval import EntmtpLM, rolling_windows
from entmtp.policy.schedulers import Policy, TauPolicy
from entmtp.target.load import load_target
from entmtp.tree.topology import Tree

CONTEXTS = ["Question: 3 + 4?\nAnswer:", "Once upon a time", "", "é ü 漢字"]
LENGTH, MASK_ID = 160, 250
TREES = [Tree(()), Tree.of([(0,), (1,), (0, 0)]), Tree.of([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])]


def requests(pairs) -> list:
    """As lm_eval.api.instance.Instance: what matters is `args`."""
    return [SimpleNamespace(args=pair) for pair in pairs]


def tree_lm(target, drafter, policy: Policy, decoding: DecodingConfig | None = None) -> EntmtpLM:
    decoder = Decoder(target, drafter, Decoder.room(LENGTH, 0, policy.max_nodes))
    return EntmtpLM(TreeEngine(decoder, policy, decoding or DecodingConfig()), max_length=LENGTH)


@pytest.fixture
def plain(tiny) -> EntmtpLM:
    return tree_lm(tiny, None, Policy("ar", [Tree(())]))


@pytest.fixture
def drafted(tiny, drafters) -> EntmtpLM:
    return tree_lm(tiny, drafters["hydra"], TauPolicy("tau", TREES, 1, 2, 0.02, 0.01))


def answers(lm: EntmtpLM, **wishes) -> list[str]:
    return lm.generate_until(requests([(context, {"max_gen_toks": 40, **wishes}) for context in CONTEXTS]), True)


def expected(target, lm: EntmtpLM, count: int = 40) -> list[str]:
    """Plain decoding's own texts."""
    decoder = Decoder(target, None, LENGTH + 1)
    ids = [lm._encode(context) or [lm._first_token] for context in CONTEXTS]
    made = [decoder.plain(one, DecodingConfig(max_new_tokens=count)).tokens for one in ids]
    return [target.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]


def test_answers_are_plain_decodings_whatever_drafts(tiny, plain, drafted):
    texts = expected(tiny, plain)
    assert answers(plain) == answers(drafted) == texts
    assert plain.speed()["tokens"] == drafted.speed()["tokens"] > 100
    assert plain.speed()["tokens_per_forward"] == 1.0, "the prefill's forward is counted with the token it gives"
    assert drafted.speed()["tokens_per_forward"] > 1.0


def whole_characters(text: str) -> str:
    """Two characters from the middle of a text, neither of them the mark of a broken one."""
    pairs = (text[place : place + 2] for place in range(len(text) // 3, len(text) - 1))
    return next(pair for pair in pairs if "\ufffd" not in pair)


def test_stop_strings_cut_the_text_wherever_steps_end(plain, drafted):
    whole = answers(plain)
    stops = [whole_characters(text) for text in whole]
    for lm in (plain, drafted):
        for context, text, stop in zip(CONTEXTS, whole, stops, strict=True):
            (cut,) = lm.generate_until(requests([(context, {"until": ["<none>", stop], "max_gen_toks": 40})]), True)
            assert cut == text[: text.index(stop)]
            (cut,) = lm.generate_until(requests([(context, {"until": stop, "max_gen_toks": 40})]), True)
            assert cut == text[: text.index(stop)]
    before = plain.tokens
    plain.generate_until(requests([(CONTEXTS[1], {"until": stops[1], "max_gen_toks": 40})]), True)
    assert plain.tokens - before < 40, "generation ends at the stop string"


def test_sampling_shares_its_noise(plain, drafted):
    wishes = {"do_sample": True, "temperature": 1.3}
    assert answers(plain, **wishes) == answers(drafted, **wishes) != answers(plain)
    assert answers(plain, do_sample=True, temperature=0.0) == answers(plain, do_sample=False, temperature=0.7)
    assert answers(plain, do_sample=True) == answers(plain, temperature=1.0)


def test_a_repeated_request_gets_another_sample(plain, drafted):
    """Tasks of several samples (pass@k, a majority's vote) ask the same several times."""
    wish = {"max_gen_toks": 20, "do_sample": True, "temperature": 1.3}
    asked = requests([(CONTEXTS[0], wish)] * 3)
    texts = plain.generate_until(asked, True)
    assert len(set(texts)) == 3 and texts == drafted.generate_until(asked, True) == plain.generate_until(asked, True)
    greedy = requests([(CONTEXTS[0], {"max_gen_toks": 20})] * 2)
    assert len(set(plain.generate_until(greedy, True))) == 1


def test_what_is_not_offered_is_refused(tiny, plain):
    for wishes, message in (
        ({"do_sample": True, "top_p": 0.9}, "top_p=0.9"),
        ({"temperature": 0.5, "top_k": 40}, "top_k=40"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"max_gen_toks": LENGTH}, f"max_gen_toks={LENGTH} leaves no context"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: must be at least 1"),
    ):
        with pytest.raises(EntmtpError, match=message):
            answers(plain, **wishes)
    assert answers(plain, top_p=0.9, top_k=40, do_sample=False) == answers(plain), "greedy knows neither"
    with pytest.raises(EntmtpError, match="batch_size=8"):
        EntmtpLM(plain.engine, batch_size=8)
    blocks = BlockEngine(BlockDecoder(tiny, MASK_ID, LENGTH + 9), BlockRule(4, 0.5))
    with pytest.raises(EntmtpError, match=r"temperature=0\.5"):
        answers(EntmtpLM(blocks, max_length=LENGTH), do_sample=True, temperature=0.5)


def test_long_contexts_lose_their_beginning(plain):
    long = "word " * 100
    (text,) = plain.generate_until(requests([(long, {"max_gen_toks": 20})]), True)
    (short,) = plain.generate_until(requests([(long[-140:], {"max_gen_toks": 20})]), True)
    assert text == short
    assert plain.speed()["shortened_contexts"] == 1


def test_blocks_of_a_self_distilled_model(tiny):
    decoder = BlockDecoder(tiny, MASK_ID, Decoder.room(LENGTH, 0, BlockDecoder.rows(4)))
    lm = EntmtpLM(BlockEngine(decoder, BlockRule(4, None)), max_length=LENGTH)
    texts = answers(lm)
    assert lm.speed()["tokens_per_forward"] > 3
    for context, text in zip(CONTEXTS, texts, strict=True):
        made = decoder.generate(lm._encode(context) or [lm._first_token], BlockRule(4, None), 40)
        assert text == tiny.tokenizer.decode(made.tokens, skip_special_tokens=True)
    # the mask token is never said, so it has no probability either
    assert lm._score([5, 6], [MASK_ID])[0] == -float("inf")
    one = EntmtpLM(BlockEngine(decoder, BlockRule(1, None)), max_length=LENGTH)
    answers(one)
    assert one.speed()["tokens_per_forward"] == 1.0


@pytest.fixture(scope="module")
def reference(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder).eval()


@torch.inference_mode()
def logp(model, before: list[int], after: list[int]) -> tuple[float, bool]:
    """transformers' own, over the whole sequence."""
    logits = model(torch.tensor([before + after])).logits[0].float().log_softmax(-1)[len(before) - 1 : -1]
    picked = [float(row[token]) for row, token in zip(logits, after, strict=True)]
    return sum(picked), [int(row.argmax()) for row in logits] == after


def test_likelihoods_are_the_models(plain, drafted, reference):
    pairs = [("The sky", " is"), ("The sky ", "is"), ("", "Once"), ("2 + 2 =", " 4\n"), ("x", ""), ("a\n", "b")]
    for lm in (plain, drafted):
        found = lm.loglikelihood(requests(pairs), True)
        assert found[0] == found[1], "white space between them belongs to the continuation"
        assert found[4] == (0.0, True)
        for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
            if continuation:
                bare = context.rstrip()
                before = lm._encode(bare) or [lm._first_token]
                after = lm._encode(context[len(bare) :] + continuation)  # a byte-level vocabulary: no merges
                wanted, wanted_greedy = logp(reference, before, after)
                assert value == pytest.approx(wanted, abs=1e-3) and greedy is wanted_greedy


def test_the_greedy_continuation_is_known_as_such(tiny, plain):
    ids = plain._encode("Once upon a time")
    tokens = Decoder(tiny, None, LENGTH).plain(ids, DecodingConfig(max_new_tokens=12)).tokens
    assert plain._score(ids, tokens)[1] is True
    assert plain._score(ids, [*tokens[:-1], (tokens[-1] + 1) % tiny.vocab_size])[1] is False


def test_scoring_leaves_decoding_as_it_was(plain, drafted):
    first = answers(drafted)
    drafted.loglikelihood(requests([("some other context", " and more")]), True)
    assert answers(drafted) == first == answers(plain)


def test_rolling_windows():
    windows = list(rolling_windows(list(range(10)), 99, 4))
    assert windows == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]  # the harness' own example
    assert list(rolling_windows([], 99, 4)) == []
    assert list(rolling_windows([1], 99, 4)) == [([99], [1])]


def test_rolling_likelihood(plain, reference):
    text = "A text that is longer than the window. " * 8
    ids = plain._encode(text)
    assert len(ids) > LENGTH
    (found,) = plain.loglikelihood_rolling(requests([(text,)]), True)
    wanted, at = 0.0, 0
    while at < len(ids):  # each window: as much context as fits before what it predicts
        end = min(at + LENGTH, len(ids))
        before = [plain._first_token] if at == 0 else ids[end - LENGTH - 1 : at]
        wanted += logp(reference, before, ids[at:end])[0]
        at = end
    assert found == pytest.approx(wanted, abs=1e-2)
    (short,) = plain.loglikelihood_rolling(requests([("Hello",)]), True)
    assert short == pytest.approx(logp(reference, [plain._first_token], plain._encode("Hello"))[0], abs=1e-3)
    with pytest.raises(EntmtpError, match="a continuation of"):
        plain.loglikelihood(requests([("x", text)]), True)


def test_chat(plain):
    chat = [{"role": "user", "content": "Hi"}]
    assert plain.apply_chat_template(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert plain._encode("<|im_end|>") == [2], "special tokens of the template are read as such"
    assert plain.chat_template(True) == plain.tokenizer.chat_template and plain.chat_template(False) is None
    assert plain.tokenizer_name == plain.target.fingerprint


def test_answers_are_remembered_for_the_harness(plain):
    heard = []
    plain.cache_hook = SimpleNamespace(add_partial=lambda *said: heard.append(said))
    (text,) = plain.generate_until(requests([("Hi", {"max_gen_toks": 4})]), True)
    (score,) = plain.loglikelihood(requests([("a", "b")]), True)
    assert heard == [("generate_until", ("Hi", {"max_gen_toks": 4}), text), ("loglikelihood", ("a", "b"), score)]


@pytest.fixture
def options(tiny_folder, tmp_path) -> dict:
    (tmp_path / "targets").mkdir()
    (tmp_path / "targets" / "tiny").symlink_to(tiny_folder)
    return {"experiment": "smoke", "resources": str(tmp_path), "results": str(tmp_path), "policy": "ar"}


def test_options_are_the_configurations(options, tiny):
    lm = EntmtpLM(**options, max_length="100", batch_size=None)
    assert lm.max_length == 100 and lm.engine.policy.name == "ar" and lm.engine.decoder.capacity == 101
    assert answers(lm) == expected(tiny, lm)
    with pytest.raises(EntmtpError, match="no fitted policy 'entmtp_tau'"):
        EntmtpLM(**{**options, "policy": "entmtp_tau"})
    with pytest.raises(EntmtpError, match="unknown policy 'fast'"):
        EntmtpLM(**{**options, "policy": "fast"})
    with pytest.raises(EntmtpError, match=r"threshold: only for a self-distilled model"):
        EntmtpLM(**options, threshold=0.9)


def test_a_self_distilled_folder(options, tiny_folder, tmp_path):
    with pytest.raises(EntmtpError, match="names no mask token"):
        open_engine({**options, "mtp": str(tiny_folder)}, 100)
    folder = tmp_path / "mtp"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_mask_id": MASK_ID, "mtp_k_max": 4}))
    engine = open_engine({**options, "mtp": str(folder), "threshold": "0.3", "k_max": 5}, 100)
    assert engine.rule == BlockRule(5, 0.3) and engine.masked == MASK_ID
    assert open_engine({**options, "mtp": str(folder), "static": 3}, 100).rule == BlockRule(3, None)
    free = open_engine({**options, "mtp": str(folder), "masks": "0.3"}, 100).rule
    assert free == BlockRule(8, 0.3, first_free=True)
    with pytest.raises(EntmtpError, match="exclude one another"):
        open_engine({**options, "mtp": str(folder), "static": 3, "threshold": 0.5}, 100)
    target = load_target(TargetConfig(source="folder", path=str(folder)), folder, "float32")
    lm = EntmtpLM(engine, max_length=100)
    made = BlockDecoder(target, MASK_ID, 200).generate(lm._encode("Hi"), BlockRule(5, 0.3), 20)
    assert lm.generate_until(requests([("Hi", {"max_gen_toks": 20})]), True) == [
        target.tokenizer.decode(made.tokens, skip_special_tokens=True)
    ]


def test_the_command_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", ["lm_eval", "gsm8k", "policy=ar"])
    assert lm_eval_module.main() == 1
    assert "pip install lm-eval" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["lm_eval", "gsm8k", "policy"])
    assert lm_eval_module.main() == 1
    assert "options are key=value" in capsys.readouterr().err


TASK = """
task: entmtp_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
GENERATED = """
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
doc_to_choice: ["4", "7", "9"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.parametrize(("kind", "rest", "metric"), [
    ("generate_until", GENERATED, "exact_match,none"), ("multiple_choice", CHOSEN, "acc,none"),
])  # fmt: skip
def test_under_the_harness_itself(kind, rest, metric, options, tiny, plain, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is optional")
    data = tmp_path / "sums.jsonl"
    questions = [f"What is {n} + {n + 1}?" for n in range(4)]
    if kind == "generate_until":  # the second half is answered as the model does, so that half of all are right
        known = plain.generate_until(requests([(q, {"until": "\n\n", "max_gen_toks": 12}) for q in questions]), True)
        right = [str(n) if n < 2 else text for n, text in enumerate(known)]
        share = sum(a.strip() == b.strip() for a, b in zip(right, known, strict=True)) / 4
    else:
        scores = [[plain.loglikelihood(requests([(q, " " + choice)]), True)[0][0] for choice in ("4", "7", "9")]
                  for q in questions]  # fmt: skip
        best = [row.index(max(row)) for row in scores]
        right = [(place + (n % 2)) % 3 for n, place in enumerate(best)]
        share = 0.5
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(questions, right)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(data=data, kind=kind, rest=rest))
    output = tmp_path / "scores.json"
    folder = str(tmp_path / "tasks")
    command = ["lm_eval", "entmtp_sums", "--include", folder, "--output", str(output), "max_length=160"]
    monkeypatch.setattr(sys, "argv", [*command, *(f"{key}={value}" for key, value in options.items())])
    assert lm_eval_module.main() == 0, capsys.readouterr().err
    done = json.loads(output.read_text())
    assert done["results"]["entmtp_sums"][metric] == pytest.approx(share)
    assert (done["speed"]["tokens"] > 0) is (kind == "generate_until")
