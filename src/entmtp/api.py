"""The library: `from entmtp import load, generate`.

    lm = load("/models/mine", heads="/models/mine-heads", bank="results/mine", task="file")
    print(generate(lm, "Write a function that reverses a string.").text)
    for piece in generate(lm, [{"role": "user", "content": "Tell me a story."}], stream=True):
        print(piece, end="", flush=True)

The tokens are those of plain decoding: greedy, or sampled with noise keyed by seed and position. In half precision near
ties may fall either way. Through transformers: `model.generate(ids, custom_generate=custom_generate, entmtp=lm)`.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entmtp.config import DecodingConfig, TargetConfig
from entmtp.decoding.processors import Processor, stateless
from entmtp.errors import EntmtpError
from entmtp.heads.drafter import make_drafter
from entmtp.heads.model import load_heads
from entmtp.heads.self_test import warn_if_implausible
from entmtp.io import check_name, read_json
from entmtp.language_model import LanguageModel, Result, Stream
from entmtp.policy.growing import GrowingPolicy
from entmtp.policy.schedulers import Policy
from entmtp.session import load_fitted
from entmtp.target import llama
from entmtp.target.fetch import hub_snapshot, shape_name
from entmtp.target.load import DTYPES, Target, fingerprint, load_target, wrap_model
from entmtp.tree.defaults import DEFAULT_TREES
from entmtp.tree.topology import Tree

__all__ = ["LanguageModel", "Result", "Stream", "custom_generate", "generate", "load", "stateless"]

# policies that need no bank: plain decoding, and one of the published trees at every step
FIXED = {"ar": DEFAULT_TREES["empty"], "hydra": DEFAULT_TREES["mc_sim_7b_63"], "medusa": DEFAULT_TREES["mc_sim_7b_63"],
         **DEFAULT_TREES}  # fmt: skip


def load(
    target: Any,
    heads: str | Path | None = None,
    *,
    bank: str | Path | None = None,
    task: str | None = None,
    policy: str | Policy | Tree | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    forward: str = "auto",
    chat_template: str | None = None,
    width: int = 16,
) -> LanguageModel:
    """A language model that drafts and verifies.

    Args:
        target: a model folder, a Hub name (with a pinned `revision`), or a loaded transformers causal LM (with its
            `tokenizer`). Of a loaded model the matrices are packed anew and the rest is read where it is, or, where
            only the generic forward knows its family, the model itself runs: load again after changing it. It is put
            into evaluation mode.
        heads: folder of draft heads in the native format (`config.json`, `model.safetensors`). Where the bank's run
            made its own heads they are found there.
        bank: folder of a finished run (`results/<experiment>`), or of one task's trees in it.
        task: whose bank and thresholds; may be left out where the run has one task.
        policy: a fitted policy of the bank (default `entmtp_tau`), or without one: `ar` (plain decoding), `hydra` or
            `medusa` (the published 63-node tree), another published tree's name, a `Tree`, a `Policy`.
        dtype: of the forwards; default float32, or the loaded model's own.
        device: default the CPU, or the loaded model's own.
        forward: auto | fused | generic.
        width: most children of a node.

    Raises:
        EntmtpError: what does not fit or is missing, by name.
    """
    fixed, folder = _choose_policy(policy, bank, task, heads)
    chosen = fixed if fixed is not None else load_fitted(folder, policy or "entmtp_tau")[0]
    drafts = bool(chosen.max_nodes or chosen.depth is not None or isinstance(chosen, GrowingPolicy))
    heads_folder = _heads_folder(heads, folder, chosen.name) if drafts else None
    if isinstance(target, str | Path):
        if tokenizer is not None:
            raise EntmtpError(f"tokenizer= goes with a loaded model; {target} has its own")
        made = _from_files(str(target), revision, dtype or "float32", device or "cpu", forward, chat_template)
        # heads of the bank's own run, and those whose card says how they were judged, are known to fit
        known, source = heads is None or (Path(heads) / "card.json").is_file(), None
    else:
        made, known = _from_model(target, tokenizer, heads_folder, dtype, device, forward, chat_template)
        source = target
    drafter = None
    if heads_folder is not None:
        drafter = make_drafter(load_heads(heads_folder, made), made, width, "bfloat16")
        if not known:
            warn_if_implausible(made, drafter, f"heads ({heads_folder})")
    return LanguageModel(made, drafter, chosen, source)


def _choose_policy(policy, bank, task: str | None, heads) -> tuple[Policy | None, Path | None]:
    """A policy that needs no bank, or the folder of trees that a fitted one is in."""
    if isinstance(policy, Policy):
        return policy, None
    if isinstance(policy, Tree):
        return Policy("tree", [policy]), None
    if policy is None and bank is None and heads is None:
        policy = "ar"
    if policy in FIXED:
        return Policy(policy, [FIXED[policy]]), None
    if bank is None:
        raise EntmtpError(
            f"policy={policy}: a fitted policy needs bank=<folder of a finished run>; without one choose "
            f"{', '.join(FIXED)}, a Tree or a Policy"
        )
    return None, _trees_folder(Path(bank), task, check_name("policy", policy or "entmtp_tau"), heads)


def _trees_folder(bank: Path, task: str | None, policy: str, heads) -> Path:
    """`<run>/trees/<kind of heads>/<task>`, by the policy that is asked for."""
    if (bank / "policy").is_dir():
        return bank.resolve()
    if not (bank / "trees").is_dir():
        raise EntmtpError(f"bank={bank}: neither the folder of a finished run (it has no trees/) nor a task's in it")
    found = sorted(path.parent.parent for path in bank.glob(f"trees/*/*/policy/{policy}.json"))
    tasks = sorted({folder.name for folder in found})
    if not found:
        names = sorted({path.stem for path in bank.glob("trees/*/*/policy/*.json")})
        raise EntmtpError(f"bank={bank}: no fitted policy '{policy}'; it has {', '.join(names) or 'none'}")
    if task is None and len(tasks) > 1:
        raise EntmtpError(f"bank={bank} was made for several tasks: say task=, one of {', '.join(tasks)}")
    if task is not None and check_name("task", task) not in tasks:
        raise EntmtpError(f"bank={bank}: no policy '{policy}' for task '{task}'; choose one of {', '.join(tasks)}")
    mine = [folder for folder in found if folder.name == (task or tasks[0])]
    fitting = [folder for folder in mine if heads and Path(heads).name.endswith(folder.parent.name)]
    if len(mine) > 1 and not fitting:
        kinds = ", ".join(folder.parent.name for folder in mine)
        raise EntmtpError(f"bank={bank}: policy '{policy}' is fitted for several kinds of heads ({kinds}): name the "
                          "folder of one, <run>/trees/<kind>/<task>")  # fmt: skip
    return max(fitting or mine, key=lambda folder: len(folder.parent.name))  # hydra_plus, not plus


def _heads_folder(heads, trees: Path | None, policy: str) -> Path:
    if heads is not None:
        return Path(heads)
    own = trees.parents[2] / "heads" / trees.parent.name if trees else None
    if own is None or not (own / "config.json").is_file():
        raise EntmtpError(
            f"policy '{policy}' drafts: say heads=<folder of draft heads> (config.json, model.safetensors)"
        )
    return own


def _from_files(name: str, revision, dtype: str, device: str, forward: str, chat_template) -> Target:
    config = TargetConfig(name=name, source="folder", path=name, forward=forward, chat_template=chat_template)
    folder = Path(name)
    if not folder.is_dir():
        folder = hub_snapshot(name, revision)
    elif not (folder / "config.json").is_file():
        raise EntmtpError(f"{name}: not a model folder (no config.json)")
    return load_target(config, folder, dtype, device)


def _from_model(model, tokenizer, heads: Path | None, dtype, device, forward, chat_template) -> tuple[Target, bool]:
    """A target around a loaded model, and whether its weights are known to be those the heads were trained for."""
    _check_model(model)
    if tokenizer is None:
        raise EntmtpError("a loaded model needs its tokenizer too: load(model, tokenizer=tokenizer, …)")
    dtype = dtype or str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise EntmtpError(f"dtype={dtype}: choose one of {', '.join(DTYPES)}")
    folder = Path(model.config.name_or_path or "/nowhere")
    known = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if known:
        identity = fingerprint(folder)
    else:  # weights without files have no digest: the shape is compared here, and the self-test looks at the rest
        shape = shape_name(model.config.to_dict())
        recorded = read_json(heads / "config.json").get("target", "") if heads else ""
        identity = recorded if recorded.startswith(f"{shape}-") else shape
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    where = device or str(model.device)
    here, asked = torch.device(model.device), torch.device(where)
    same = here.type == asked.type and asked.index in (None, here.index)
    elsewhere = not same or dtype != str(model.dtype).removeprefix("torch.")
    if elsewhere and (forward == "generic" or not llama.supports(model.config)):
        raise EntmtpError(f"dtype={dtype}, device={where}: the generic forward runs this model itself, which is "
                          f"{model.dtype} on {model.device}; load it so, or give its folder")  # fmt: skip
    trained = [parameter for parameter in model.eval().parameters() if parameter.requires_grad]
    made = wrap_model(model, tokenizer, forward, dtype, where, identity)
    for parameter in trained:  # the generic forward freezes what it runs
        parameter.requires_grad_(True)
    return made, known


def _check_model(model) -> None:
    """Refuse what would silently give another model's tokens."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise EntmtpError(
            f"{type(model).__name__} is not a transformers model (folder names and loaded causal LMs are; of a PEFT "
            "model take merge_and_unload())"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise EntmtpError("the model has adapters, which the fused forward would pass over: merge them first")
    if len(set((getattr(model, "hf_device_map", None) or {"": 0}).values())) > 1:
        raise EntmtpError("the model is spread over several devices: load it on one")
    quantised = getattr(model.config, "quantization_config", None) or {}
    method = quantised.get("quant_method") if isinstance(quantised, dict) else getattr(quantised, "quant_method", None)
    if method not in (None, "gguf") or not all(p.is_floating_point() for p in model.parameters()):
        raise EntmtpError(f"quantised weights ({method}) are not supported: load the model in float32 or bfloat16")


def decoding_of(max_new_tokens: int, temperature: float, seed: int, lossy: bool) -> DecodingConfig:
    """Greedy at temperature 0, exact sampling above; `lossy` asks for typical acceptance (Medusa, section 2.3.2)."""
    try:
        max_new_tokens = operator.index(max_new_tokens)  # NumPy's integers too; 1.5 is none
    except TypeError as error:
        raise EntmtpError(f"max_new_tokens={max_new_tokens}: must be a whole number") from error
    if max_new_tokens < 1:
        raise EntmtpError(f"max_new_tokens={max_new_tokens}: must be at least 1")
    if not isfinite(temperature) or temperature < 0:
        raise EntmtpError(f"temperature={temperature}: must be 0 (greedy) or above")
    if lossy and not temperature:
        raise EntmtpError("lossy=True is typical acceptance: it needs a temperature above 0")
    mode = "typical" if lossy else "sample" if temperature else "greedy"
    return DecodingConfig(mode, max_new_tokens, temperature, seed)


def generate(
    lm: LanguageModel,
    prompt: str | Sequence[dict] | Sequence[int],
    *,
    stream: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop: str | Iterable[str] = (),
    stop_ids: Iterable[int] | None = None,
    processors: Iterable[Processor] | None = None,
    chat: bool | None = None,
    prompt_id: str = "",
    lossy: bool = False,
) -> Result | Stream:
    """Generate one text: a `Result`, or with `stream=True` a `Stream` of its pieces.

    Args:
        prompt: the user's turn, a chat ({role, content} dicts that end with the user's turn), or token ids.
        temperature: 0 is greedy; above, the exact distribution is sampled, the same text for every policy.
        seed: of the noise, with the position and `prompt_id`.
        stop: the text ends before any of these strings.
        stop_ids: replace the model's own stop tokens.
        processors: transformers logits processors, applied to the logits before the temperature. Those that are pure
            functions of (input_ids, scores) are taken; one's own are promised to be so by `entmtp.stateless(…)`.
        chat: False continues a string as it is.
        prompt_id: of the noise: texts of different ids are independent.
        lossy: typical acceptance, whose text depends on the trees.

    Raises:
        EntmtpError: a prompt that does not fit, a processor that is not known to keep the text, an ill value.
    """
    decoding = decoding_of(max_new_tokens, temperature, seed, lossy)
    made = lm.stream_ids(lm.encode(prompt, chat), decoding, prompt_id=prompt_id, stop=stop, stop_ids=stop_ids,
                         processors=processors)  # fmt: skip
    if stream:
        return made
    for _ in made:
        pass
    return made.result


@torch.no_grad()
def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    entmtp: LanguageModel,
    seed: int | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """transformers' decoding loop, replaced: `model.generate(ids, custom_generate=custom_generate, entmtp=lm, …)`.

    `lm` must have been loaded from this very `model`. Everything that `generate` prepares is heeded: lengths, stop
    tokens, stopping criteria, processors and warpers (`do_sample`, `temperature`, `top_p`, `repetition_penalty`, …) as
    far as they are pure functions. Greedy gives `generate`'s own tokens in float32; with `do_sample` the distribution
    is the same, the draws are not (`seed`: of the noise; without one torch's generator gives it).

    Args:
        on_tokens: called with the tokens of each step (transformers does not hand a `streamer` on to callables).

    Returns:
        input_ids and the new tokens, [1, n].
    """
    _check_hook(entmtp, model, input_ids, generation_config, model_kwargs)
    prompt = input_ids[0].tolist()
    ends = generation_config.eos_token_id
    stop_ids = set() if ends is None else set(ends if isinstance(ends, list) else [ends])
    if seed is None:
        seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
    budget = generation_config.max_length - len(prompt)
    # the temperature is one of the warpers that come with the processors
    decoding = decoding_of(budget, 1.0 if generation_config.do_sample else 0.0, seed, lossy=False)
    text = list(prompt)
    for step in entmtp.steps(prompt, decoding, "", stop_ids, logits_processor):
        if step is None:
            continue
        begin, ended = len(text), False
        for token in step.tokens:  # criteria are asked after each token, as plain decoding does
            text.append(token)
            ids = torch.tensor([text], device=input_ids.device)
            ended = bool(stopping_criteria is not None and stopping_criteria(ids, None).all())
            if ended:
                break
        if on_tokens is not None:
            on_tokens(text[begin:])
        if ended:
            break
    return torch.tensor([text], device=input_ids.device)


def _check_hook(lm: LanguageModel, model, input_ids: Tensor, config, model_kwargs: dict) -> None:
    if lm.source is not model:
        raise EntmtpError("entmtp= must be what load() made of this very model: load(model, tokenizer=tokenizer, …)")
    if (config.num_beams or 1) != 1 or (config.num_return_sequences or 1) != 1:  # generate has repeated the rows by now
        raise EntmtpError("one sequence, without beams: num_beams and num_return_sequences must be 1")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise EntmtpError(f"{mode.replace('_', ' ')} is not supported: greedy decoding and sampling are")
    if len(input_ids) != 1:
        raise EntmtpError(f"batch size 1 only, found {len(input_ids)} rows of input_ids")
    if model_kwargs.get("attention_mask") is not None or model_kwargs.get("inputs_embeds") is not None:
        raise EntmtpError("padded inputs and inputs_embeds are not supported: give input_ids without padding")
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length():
        raise EntmtpError("a filled cache is not supported: give the whole text as input_ids")
    asked = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
    found = [key for key in asked if getattr(config, key, None)]
    if found:
        raise EntmtpError(f"{', '.join(found)}: only the token ids come back through custom_generate")
