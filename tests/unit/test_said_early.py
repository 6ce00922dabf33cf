"""Values that would fail hours later are refused when the configuration is composed."""

import pytest

from entmtp.config import compose
from entmtp.errors import EntmtpError
from entmtp.io import write_json
from entmtp.sweep_gather import STARTED, own_rows


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("confadapt.thresholds=[1.5]", r"confadapt\.thresholds': 1\.5 must be above 0 and at most 1"),
        ("confadapt.mask_thresholds=[0]", r"confadapt\.mask_thresholds': 0\.0 must be above 0"),
        ("confadapt.static=[0]", r"confadapt\.static': 0 must be from 1 to confadapt\.k_max=8"),
        ("confadapt.static=[9]", r"confadapt\.static': 9 must be from 1 to confadapt\.k_max=8"),
        ("distill.report_every=0", r"distill\.report_every': 0 must be at least 1"),
        ("distill.checkpoint_every=0", r"distill\.checkpoint_every': 0 must be at least 1"),
        ("distill.steps=0", r"distill\.steps': 0 must be at least 1"),
        ("distill.lora_rank=0", r"distill\.lora_rank': with distill\.masks_only"),
        ("bench.bootstrap=0", r"bench\.bootstrap': 0 must be at least 1"),
        ("scheduling.bank_trees=0", r"scheduling\.bank_trees': 0 must be at least 1"),
        ("policies=[hydra]", r"'policies': \['hydra'\] lacks ar"),
    ],
)
def test_a_value_that_cannot_work_is_named_at_once(override, message):
    with pytest.raises(EntmtpError, match=message):
        compose([override])


def test_sweeps_below_a_sweeps_folder_are_their_own(tmp_path):
    nested = tmp_path / "2026-12-01" / "04-00-00"
    for folder in (tmp_path, nested):
        write_json(folder / STARTED, "now")
        write_json(folder / "0" / "row.json", {"job": 0})
    assert own_rows(tmp_path) == [tmp_path / "0" / "row.json"]
    assert own_rows(nested) == [nested / "0" / "row.json"]
