"""llama.cpp as a peer (`pip install llama-cpp-python` compiles it for this machine; it is no requirement of ours).

Its model is the very file that our target was made from: as packed, or with the weights spelled out in the precision of
the run, which are then the same numbers as ours.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from entmtp.config import TargetConfig, from_plain
from entmtp.errors import EntmtpError
from entmtp.io import atomic
from entmtp.target.fetch import packed_gguf
from entmtp.target.load import load_tokenizer, stop_ids


def spelled_out(source: Path, made: Path, dtype: str) -> Path:
    """A GGUF like `source` whose matrices are float32 or bfloat16 in place of quantised, unless `made` is there."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    if made.is_file():
        return made
    kind = {"float32": GGMLQuantizationType.F32, "bfloat16": GGMLQuantizationType.BF16}[dtype]
    reader = GGUFReader(source)
    with atomic(made) as partial:
        writer = GGUFWriter(partial, reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            # what the writer writes by itself, and a description that would no longer be true
            if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
                array = field.types[0] == GGUFValueType.ARRAY
                writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if values.ndim < 2 or kind == GGMLQuantizationType.F32:
                writer.add_tensor(tensor.name, values)
            else:
                writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return made


def llama_cpp(setting: dict, packed: bool) -> Callable[[str, list[int], int], list[int]]:
    """llama.cpp's greedy decoding, of the file as it was packed or in the precision of the run."""
    from llama_cpp import Llama

    target = from_plain(TargetConfig, setting["target"])
    if target.source != "wheel":
        raise EntmtpError(f"target {target.name} comes from no GGUF")
    folder = Path(setting["resources"]) / "peers" / target.sha256[:12]  # another wheel's file is another one
    path = packed_gguf(target, folder)
    if not packed:
        path = spelled_out(path, folder / f"{path.stem}.{setting['dtype']}.gguf", setting["dtype"])
    model = Llama(str(path), n_ctx=setting["capacity"], n_threads=setting["threads"],
                  n_threads_batch=setting["threads"], verbose=False)  # fmt: skip
    stops = _stops(setting["folder"])

    def generate(task: str, prompt: list[int], budget: int) -> list[int]:
        model.reset()  # no prefix of an earlier prompt is reused: the other peers reuse none
        made: list[int] = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            made.append(token)
            if token in stops or len(made) == budget:
                break
        return made

    return generate


def _stops(folder: str) -> set[int]:
    from transformers import AutoConfig, GenerationConfig

    configs = SimpleNamespace(
        config=AutoConfig.from_pretrained(folder, trust_remote_code=False),
        generation_config=GenerationConfig.from_pretrained(folder),
    )
    return stop_ids(configs, load_tokenizer(folder))
