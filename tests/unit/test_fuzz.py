"""Whatever a file holds, a reader either reads it or says in one EntmtpError what is wrong: never another exception.

A few seconds here; `ENTMTP_FUZZ=3000` tries that many inputs a reader.
"""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entmtp import io
from entmtp.config import TaskConfig
from entmtp.errors import EntmtpError
from entmtp.heads.model import load_heads, save_heads
from entmtp.session import load_fitted
from entmtp.tasks import load_source, read_prompts
from entmtp.tree.bank import Bank

COUNT = int(os.environ.get("ENTMTP_FUZZ", "60"))
fuzz = settings(max_examples=COUNT, suppress_health_check=[HealthCheck.function_scoped_fixture])

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 12) | st.just(10**40) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["user", "hydra", "tau", "star", "[0]", "\ud800"])
)  # fmt: skip
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def dumps(value) -> bytes:
    return json.dumps(value).encode()


def changed(value, data):
    """A JSON value with one place of it replaced by anything, or removed."""
    if isinstance(value, dict) and value and data.draw(st.booleans(), label="deeper"):
        key = data.draw(st.sampled_from(sorted(value)))
        if data.draw(st.integers(0, 5)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans(), label="deeper"):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(value[place], data), *value[place + 1 :]]
    return data.draw(JSON)


def reads_or_refuses(read) -> bool:
    try:
        read()
    except EntmtpError as error:
        assert str(error) and "\n" not in str(error)[:40]
        return False
    return True


# -- JSON and JSONL


DEEP = b"[" * 200_000
LONG = b"1" * 6000


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"\xef\xbb\xbf{}", DEEP, LONG, b'{"a":', b"NaN x", b"\x00" * 9])
def test_broken_json_is_one_message(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(EntmtpError, match=r"a\.json"):
        io.read_json(tmp_path / "a.json")
    with pytest.raises(EntmtpError, match=r"a\.json"):  # blank: no rows, which the task's reader says
        list(load_source(TaskConfig(source="file", file=str(tmp_path / "a.json")), tmp_path))


@given(st.binary(max_size=60) | JSON.map(dumps))
@fuzz
def test_any_bytes_as_json_jsonl_and_parquet(tmp_path, content):
    path = tmp_path / "any"
    path.write_bytes(content)
    for reader in (io.read_json, io.read_jsonl, io.read_parquet):
        reads_or_refuses(lambda: reader(path))  # noqa: B023
    reads_or_refuses(lambda: io.Journal(path, "job"))


@given(st.lists(JSON | st.fixed_dictionaries({"prompt": JSON}) | st.fixed_dictionaries({"messages": st.lists(
    st.fixed_dictionaries({"role": JSON, "content": JSON}) | JSON, max_size=3)}) | st.fixed_dictionaries(
    {"turns": st.lists(JSON, max_size=2), "id": JSON}), max_size=4))  # fmt: skip
@fuzz
def test_any_rows_as_prompts(tmp_path, rows):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\n".join(dumps(row) for row in rows))
    reads_or_refuses(lambda: list(load_source(TaskConfig(source="file", file=str(path)), tmp_path)))
    reads_or_refuses(lambda: read_prompts(path))


def test_every_prefix_of_a_prompts_file_reads_or_refuses(tmp_path):
    path, whole = tmp_path / "mine.jsonl", dumps({"prompt": "ü🙂"}) + b"\n" + '{"prompt": "ü🙂"}\n'.encode()
    read = 0
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        read += reads_or_refuses(lambda: list(load_source(TaskConfig(source="file", file=str(path)), tmp_path)))
    assert read >= 3  # after the first line, after the second without and with its end


# -- banks and policies


@given(st.data())
@fuzz
def test_a_changed_bank_or_policy_is_refused_or_can_be_used(world, tmp_path_factory, data):
    folder = world / "results/smoke/trees/hydra/sharegpt"
    work = tmp_path_factory.getbasetemp() / "fuzzed"
    (work / "policy").mkdir(parents=True, exist_ok=True)
    bank, policy = io.read_json(folder / "bank.json"), io.read_json(folder / "policy" / "entmtp_tau.json")
    if data.draw(st.booleans(), label="the policy, not the bank"):
        policy = changed(policy, data)
    else:
        bank = changed(bank, data)
    (work / "bank.json").write_bytes(dumps(bank))
    (work / "policy" / "entmtp_tau.json").write_bytes(dumps(policy))
    reads_or_refuses(lambda: Bank.load(work / "bank.json").star)

    def use():
        built, _, _ = load_fitted(work, "entmtp_tau")
        built.reset()
        for s in (0.0, 0.3, 1.0):
            assert built.max_nodes >= 0 and 0 <= built.choose(s) < max(1, len(built.trees))

    reads_or_refuses(use)


GROWING = {"policy": "m", "kind": "marginal", "heads": "hydra", "tree": None, "depth": None, "tau_on": None,
           "tau_off": None, "thresholds": None, "trees": [], "start": 0, "growing": {
               "nodes": 2, "beam": 2, "children": 2, "max_depth": 1, "expand": 0.1, "rate": 0.05,
               "step_ms": [20.0, 21.0, 22.0], "calibration": {"edges": [[0.5]], "values": [[0.02, 0.9]]}}}  # fmt: skip


@given(st.data())
@fuzz
def test_a_changed_growing_policy_is_refused_or_can_be_used(tmp_path, data):
    (tmp_path / "policy").mkdir(exist_ok=True)
    (tmp_path / "policy" / "marginal.json").write_bytes(dumps(changed(GROWING, data)))

    def use():
        built, _, _ = load_fitted(tmp_path, "marginal")
        if hasattr(built, "size"):
            assert 0 <= built.size([(0.9, 1), (0.1, 1)]) <= 2 or built.nodes > 2
            assert built.parents([0], [1.0]) in ([], [0])

    reads_or_refuses(use)


def test_the_unchanged_files_are_read(world, tmp_path):
    folder = world / "results/smoke/trees/hydra/sharegpt"
    assert load_fitted(folder, "entmtp_tau")[0].tau_on == 0.02
    io.write_json(tmp_path / "policy" / "marginal.json", GROWING)
    assert load_fitted(tmp_path, "marginal")[0].size([(0.9, 1), (0.1, 1)]) == 1


# -- weights


@pytest.fixture
def saved(tmp_path, tiny_heads):
    save_heads(tiny_heads["hydra_plus"], tmp_path / "heads")
    return tmp_path / "heads"


@given(data=st.data())
@fuzz
def test_a_changed_heads_config_is_refused_or_read(saved, tiny, data):
    whole = io.read_json(saved / "config.json") if not (saved / "kept.json").exists() else io.read_json(
        saved / "kept.json")  # fmt: skip
    (saved / "kept.json").write_bytes(dumps(whole))
    (saved / "config.json").write_bytes(dumps(changed(whole, data)))
    reads_or_refuses(lambda: load_heads(saved, tiny))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_heads_cut_at_any_byte_are_refused(saved, tiny, name):
    content = (saved / name).read_bytes()
    sizes = [*range(min(len(content), 40)), *range(40, len(content), max(1, len(content) // 60))]
    for size in sizes:
        (saved / name).write_bytes(content[:size])
        assert not reads_or_refuses(lambda: load_heads(saved, tiny)), size
    (saved / name).write_bytes(content)
    assert load_heads(saved, tiny).config.depth == 4


@given(data=st.data())
@fuzz
def test_heads_with_changed_bytes_are_refused_or_read(saved, tiny, data):
    path, kept = saved / "model.safetensors", saved / "kept"
    if not kept.exists():
        kept.write_bytes(path.read_bytes())
    content = bytearray(kept.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):  # mostly in the header, whose length is in the first eight bytes
        content[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    reads_or_refuses(lambda: load_heads(saved, tiny))


def test_parquet_cut_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    io.write_parquet(path, [{"prompt_id": str(n), "tokens": list(range(n))} for n in range(20)])
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        assert not reads_or_refuses(lambda: io.read_parquet(path)), size


@given(data=st.data())
@fuzz
def test_parquet_with_changed_bytes_is_refused_or_read(tmp_path, data):
    path, kept = tmp_path / "a.parquet", tmp_path / "kept"
    if not kept.exists():
        io.write_parquet(kept, [{"prompt_id": str(n), "tokens": list(range(n))} for n in range(20)])
    content = bytearray(kept.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    reads_or_refuses(lambda: io.read_parquet(path))
