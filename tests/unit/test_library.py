"""`from entmtp import load, generate`: one's own transformers model, the tokens of plain decoding, clear refusals."""

import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, SuppressTokensLogitsProcessor

from entmtp import LanguageModel, generate, load, stateless
from entmtp.config import DecodingConfig
from entmtp.decoding.text_stream import StopStrings
from entmtp.errors import EntmtpError
from entmtp.heads.model import save_heads
from entmtp.policy.schedulers import Policy
from entmtp.tree.topology import Tree

CHAIN = Policy("chain", [Tree.of([(0,) * d for d in range(1, 5)])])
STORY = "Tell me a story"


def knowing(tiny, oracle, ids: list[int], text: list[int], **options) -> LanguageModel:
    """A model whose drafter knows the continuation: five tokens a step, or as many as `options` let it."""
    drafter = oracle(**{"wrong": 0.0, "top": 1, **options})
    made = LanguageModel(tiny, drafter, CHAIN)
    drafter.attach(made.decoder(1024), ids, text)
    return made


def test_five_lines_with_a_model_of_ones_own(lm, model, tokenizer):
    made = generate(lm, STORY, max_new_tokens=40)
    ids = torch.tensor([lm.encode(STORY)])
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    assert made.tokens == plain and made.lossless == "exact"
    assert made.text == str(made) == tokenizer.decode(plain, skip_special_tokens=True)
    assert made.finish in ("length", "stop_token")
    assert "".join(generate(lm, STORY, max_new_tokens=40, stream=True)) == made.text
    assert all(parameter.requires_grad for parameter in model.parameters()), "the caller's model stays trainable"


@pytest.mark.parametrize("policy", ["entmtp_tau", "entmtp_ladder", "hydra", "fixed_16", "ar", Tree.of([(0,), (1,)])])
def test_from_a_folder_every_policy_gives_the_same_text(lm, run, tiny_folder, policy):
    bank = run if isinstance(policy, str) and policy.startswith("entmtp") else None
    made = load(tiny_folder, run / "heads" / "hydra", bank=bank, policy=policy)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        assert generate(made, STORY, max_new_tokens=30, **options).tokens == generate(
            lm, STORY, max_new_tokens=30, **options
        ).tokens  # fmt: skip


def test_one_task_of_a_run_is_named_by_its_folder_too(lm, run, tiny_folder):
    made = load(tiny_folder, bank=run / "trees" / "hydra" / "sharegpt", policy="entmtp_ladder")
    assert made.policy.name == "entmtp_ladder"
    assert generate(made, STORY, max_new_tokens=9).tokens == generate(lm, STORY, max_new_tokens=9).tokens


def test_steps_add_up(tiny, oracle, greedy_texts, prompts):
    made = generate(knowing(tiny, oracle, prompts[2], greedy_texts[2]), prompts[2], max_new_tokens=33)
    assert made.tokens == greedy_texts[2][:33]
    assert [token for step in made.steps for token in step.tokens] == made.tokens
    assert "".join(step.text for step in made.steps) == made.text
    assert made.accept_length == pytest.approx(sum(len(s.tokens) for s in made.forwards) / len(made.forwards))
    assert max(step.accepted for step in made.forwards) == 4
    assert json.loads(json.dumps(asdict(made)))["steps"][0]["nodes"] == 4
    assert made.tokens_per_s > 0


def test_chats_strings_and_ids_are_prompts(lm, tokenizer):
    chat = [{"role": "user", "content": "Hi"}]
    assert lm.encode("Hi") == lm.encode(chat) == lm.encode(lm.encode(chat))
    assert lm.encode("Hi", chat=False) == tokenizer("Hi")["input_ids"]
    longer = [*chat, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "🙂"}]
    assert generate(lm, longer, max_new_tokens=5).tokens == generate(lm, lm.encode(longer), max_new_tokens=5).tokens


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "non-empty list of token ids"),
        ([[5, 6], [7, 8]], {}, r"one list of token ids \(batch size 1 only\)"),
        ([5, 1.9], {}, "one list of token ids"),
        ([5, 999], {}, "token id 999 is outside the target's vocabulary of 259: is this its own tokenizer"),
        ("half a pair \ud83d", {}, "not valid Unicode"),
        ([{"role": "user"}], {}, "must be an object with role and content"),
        ([{"role": "assistant", "content": "Ho"}], {}, "must end with a user turn"),
        ([{"role": "robot", "content": "Ho"}], {}, "role 'robot' does not exist"),
        ("Hi", {"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        ("Hi", {"max_new_tokens": 5000}, "exceeds the model's 1024 positions"),
        ("Hi", {"temperature": -1.0}, "temperature=-1.0"),
        ("Hi", {"stop": ["a", ""]}, "stop strings must be non-empty"),
        ("Hi", {"lossy": True}, "needs a temperature above 0"),
    ],
)
def test_prompts_and_values_that_cannot_work(lm, prompt, options, message):
    with pytest.raises(EntmtpError, match=message):
        generate(lm, prompt, stream=True, **options)  # said at once, not when the stream is read


def test_only_exact_modes_unless_asked(lm):
    made = generate(lm, STORY, max_new_tokens=10, temperature=0.7, lossy=True)
    assert made.lossless == "lossy" and generate(lm, STORY, max_new_tokens=3, temperature=0.7).lossless == "exact"


def test_a_second_text_ends_the_first(lm):
    first = generate(lm, STORY, stream=True, max_new_tokens=40)
    next(first)
    assert generate(lm, STORY, max_new_tokens=4).tokens
    with pytest.raises(EntmtpError, match="another text has been started"):
        list(first)


def test_the_cache_grows_with_the_prompt(model, tokenizer, run):
    made = load(model, tokenizer=tokenizer, bank=run)
    short, long = list(range(3, 40)), list(range(3, 250)) * 3
    before = generate(made, short, max_new_tokens=12).tokens
    assert generate(made, long, max_new_tokens=12).tokens == generate(
        load(model, tokenizer=tokenizer), long, max_new_tokens=12
    ).tokens  # fmt: skip
    assert generate(made, short, max_new_tokens=12).tokens == before


# -- stop strings


PIECES = st.lists(st.text("ab.", max_size=3), max_size=12)


@given(PIECES, st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_how_the_text_is_divided(pieces, strings):
    stops, shown, ended = StopStrings(strings), "", False
    for count, piece in enumerate(pieces, 1):
        new, ended = stops.push(piece)
        shown += new
        seen = "".join(pieces[:count])
        assert ended == any(string in seen for string in strings)
        if ended:
            break
    shown += "" if ended else stops.close()
    whole = "".join(pieces[: count if ended else len(pieces)]) if pieces else ""
    places = [whole.find(string) for string in strings if string in whole]
    assert shown == (whole[: min(places)] if places else whole)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_cuts_at_the_same_token_whatever_was_committed_together(
    tiny, oracle, prompts, greedy_texts, size
):
    """One letter a token: stop strings begin and end at every place of a five-token step, and across two."""
    ids = prompts[2]
    letters = [token for token in range(3, 259) if tiny.tokenizer.decode([token]).isalpha()]
    others = SuppressTokensLogitsProcessor([token for token in range(259) if token not in letters])
    plain = LanguageModel(tiny, None, Policy("ar", [Tree(())]))
    text = generate(plain, ids, max_new_tokens=60, processors=[others]).tokens
    whole = tiny.tokenizer.decode(text[:40])
    assert len(whole) == 40
    cut_in_step = 0
    for start in range(0, 40 - size, 3):
        stop = whole[start : start + size]
        expected = generate(plain, ids, stop=stop, max_new_tokens=40, processors=[others])
        assert expected.finish == "stop_string" and expected.text == whole[: whole.index(stop)]
        assert expected.tokens == text[: whole.index(stop) + size]
        made = generate(knowing(tiny, oracle, ids, text), ids, stop=[stop], max_new_tokens=40, stream=True,
                        processors=[others])  # fmt: skip
        assert "".join(made) == made.result.text == expected.text
        assert made.result.tokens == expected.tokens
        cut_in_step += made.result.steps[-1].accepted not in (0, 4)
    assert cut_in_step > 2


def test_a_special_token_as_stop_string_ends_the_text(tiny, oracle, prompts):
    """Decoded text leaves special tokens out, so that no text would ever hold the string."""
    ids = prompts[2]

    def forced(input_ids, scores):
        if input_ids.shape[1] == len(ids) + 6:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 1] = 0.0
        return scores

    plain = LanguageModel(tiny, None, Policy("ar", [Tree(())]))
    options = {"max_new_tokens": 20, "processors": [stateless(forced)]}
    free = generate(plain, ids, **options)
    assert free.tokens[6] == 1 and len(free.tokens) > 7
    for lm in (plain, knowing(tiny, oracle, ids, free.tokens)):
        made = generate(lm, ids, stop=["nowhere", "<|im_start|>"], **options)
        assert made.tokens == free.tokens[:7] and made.finish == "stop_string"
        assert made.text == tiny.tokenizer.decode(free.tokens[:6])


def test_stop_tokens_end_the_text_and_are_not_shown(tiny, oracle, prompts, greedy_texts):
    ids, text = prompts[3], greedy_texts[3]
    for place in (0, 1, 7):
        stop_ids = {text[place]}
        end = text.index(text[place])
        made = generate(knowing(tiny, oracle, ids, text), ids, stop_ids=stop_ids, max_new_tokens=30)
        assert made.tokens == text[: end + 1] and made.finish == "stop_token"
        assert made.text == tiny.tokenizer.decode(text[:end], skip_special_tokens=True)


# -- loading


class Foreign(torch.nn.Module):
    pass


def test_what_does_not_fit_is_said(tmp_path, model, tokenizer, run, tiny_folder):
    heads = run / "heads" / "hydra"
    for arguments, options, message in [
        ((tmp_path,), {}, "not a model folder"),
        (("owner/name",), {}, "no such folder; a Hub name needs a pinned revision"),
        ((model,), {}, "needs its tokenizer too"),
        ((tiny_folder,), {"tokenizer": tokenizer}, "tokenizer= goes with a loaded model"),
        ((Foreign(),), {"tokenizer": tokenizer}, "Foreign is not a transformers model"),
        ((tiny_folder,), {"policy": "hydra"}, "say heads="),
        ((tiny_folder, heads), {"policy": "entmtp_tau"}, "needs bank="),
        ((tiny_folder, heads), {}, "needs bank="),
        ((tiny_folder, tmp_path), {"policy": "hydra"}, "no heads here"),
        ((tiny_folder,), {"bank": tmp_path}, "neither the folder of a finished run"),
        ((tiny_folder,), {"bank": run, "policy": "entmtp_star"}, "it has adaptive, entmtp_ladder, entmtp_tau"),
        ((tiny_folder,), {"bank": run, "task": "humaneval"}, "choose one of sharegpt"),
        ((tiny_folder,), {"bank": run, "task": "../hydra/sharegpt"}, "letters, digits"),
        ((tiny_folder,), {"bank": run, "policy": "../../x"}, "letters, digits"),
        ((tiny_folder,), {"dtype": "int8"}, "choose one of float32"),
        ((tiny_folder, heads), {"policy": "hydra", "width": 101}, "exceeds the draft vocabulary"),
    ]:
        with pytest.raises(EntmtpError, match=message):
            load(*arguments, **options)


def test_models_that_the_fused_forward_would_misread_are_refused(tiny_folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    model._hf_peft_config_loaded = True
    with pytest.raises(EntmtpError, match="adapters"):
        load(model, tokenizer=tokenizer)
    model._hf_peft_config_loaded = False
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    with pytest.raises(EntmtpError, match="quantised weights"):
        load(model, tokenizer=tokenizer)


def test_heads_for_weights_without_files_are_judged_by_what_they_accept(model, tokenizer, tiny_heads, tmp_path, capsys):
    """A model made in memory has no weight files to compare: its shape must fit, and the self-test speaks."""
    made = type(model)(changed(model.config))
    save_heads(tiny_heads["hydra"], tmp_path / "heads")
    assert load(made, tmp_path / "heads", tokenizer=tokenizer, policy="chain_4").drafter is not None
    assert "drafted tokens a step" in capsys.readouterr().err
    other = type(model)(changed(model.config, hidden_size=24, head_dim=4))
    with pytest.raises(EntmtpError, match="heads for hidden size 48"):
        load(other, tmp_path / "heads", tokenizer=tokenizer, policy="chain_4")


def test_heads_without_a_card_are_judged_by_what_they_accept(tiny_folder, tiny_heads, tmp_path, capsys):
    """Converted heads say that they are this target's; whether they were trained for these weights nobody knows."""
    save_heads(tiny_heads["hydra"], tmp_path / "heads")
    load(str(tiny_folder), tmp_path / "heads", policy="chain_4")
    assert "drafted tokens a step" in capsys.readouterr().err
    (tmp_path / "heads" / "card.json").write_text("{}")
    load(str(tiny_folder), tmp_path / "heads", policy="chain_4")
    assert "drafted tokens a step" not in capsys.readouterr().err


def test_a_model_that_runs_itself_is_not_changed_by_loading(model, tokenizer):
    with pytest.raises(EntmtpError, match=r"dtype=bfloat16.*the generic forward runs this model itself"):
        load(model, tokenizer=tokenizer, policy="ar", forward="generic", dtype="bfloat16")
    assert model.dtype == torch.float32
    load(model, tokenizer=tokenizer, policy="ar", dtype="bfloat16")  # matrices packed anew
    assert model.dtype == torch.float32


def changed(config, **changes):
    made = type(config)(**{**config.to_dict(), **changes})
    made.name_or_path = ""
    return made


# -- the package


def test_importing_the_package_is_cheap_and_generate_is_always_callable():
    code = (
        "import sys, entmtp; assert not {'torch', 'numpy', 'hydra'} & set(sys.modules);"
        "import entmtp.generate; from entmtp import generate, load; assert callable(generate) and callable(load);"
        "assert callable(entmtp.generate); print(entmtp.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ImportError, match="nonsense"):
        from entmtp import nonsense  # noqa: F401


def test_the_module_called_is_the_function(lm):
    import entmtp.generate as module

    assert module(lm, STORY, max_new_tokens=3).tokens == generate(lm, STORY, max_new_tokens=3).tokens


def test_replaced_stop_ids_do_not_change_the_target(tiny, prompts):
    made = LanguageModel(replace(tiny, stop_ids=set()), None, Policy("ar", [Tree(())]))
    text = generate(made, prompts[1], max_new_tokens=12).tokens
    assert generate(made, prompts[1], max_new_tokens=12, stop_ids=text).tokens == text[:1]
    assert generate(made, prompts[1], max_new_tokens=12).tokens == text
    assert made.steps(prompts[1], DecodingConfig(max_new_tokens=2)) is not None


def test_a_processor_that_asks_its_own_model_is_told_so(lm):
    asked = stateless(lambda ids, scores: generate(lm, STORY, max_new_tokens=2) and scores)
    with pytest.raises(EntmtpError, match="asks the very model whose step it is called in"):
        generate(lm, STORY, max_new_tokens=4, processors=[asked])
    assert generate(lm, STORY, max_new_tokens=4).tokens


def test_a_refused_text_leaves_the_running_one_alone(tiny, drafters):
    """Hydra++ keeps a cache of its own, which a larger decoder would have replaced."""
    made = LanguageModel(tiny, drafters["hydra_plus"], CHAIN)
    ids = made.encode(STORY)
    expected = [step.accepted for step in made.steps(ids, DecodingConfig(max_new_tokens=40)) if step is not None]
    running = made.steps(ids, DecodingConfig(max_new_tokens=40))
    seen = [next(running), next(running)]
    with pytest.raises(EntmtpError, match="outside the target's vocabulary"):
        made.steps([*range(3, 200), 10**6], DecodingConfig(max_new_tokens=200))
    assert [step.accepted for step in [*seen, *running] if step is not None] == expected


def test_two_threads_never_share_a_turn(lm):
    """Whoever starts second, even between the first one's start and its first step, has the cache to itself."""
    decoding, ids, started = DecodingConfig(max_new_tokens=8), lm.encode(STORY), []

    class Interrupted:
        """A lock at whose first release another thread starts a text."""

        def __init__(self):
            self.lock = threading.Lock()

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()
            if not started:
                started.append(None)
                started.append(lm.steps(ids, decoding))

    own, lm._lock = lm._lock, Interrupted()
    try:
        first = lm.steps(ids, decoding)
        with pytest.raises(EntmtpError, match="another text has been started"):
            next(first)
        assert [step for step in started[1] if step is not None][-1].tokens
    finally:
        lm._lock = own
