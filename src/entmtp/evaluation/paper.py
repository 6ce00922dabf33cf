"""The paper's own figures, printed beside ours and always marked as the paper's.

Source: EntMTP, arXiv 2606.27550, measured there with Vicuna-7B (shared FACTS 5). A (low, high) pair is the range over
tasks that the paper states; low None means "up to". The per-task gain on ShareGPT (+7.8%) lies below the stated range
over tasks (1.09–1.15): both are given as the paper states them.
"""

LABEL = "paper (Vicuna-7B)"
POLICY = "EntMTP-τ"
SOURCE = "arXiv 2606.27550"

# Task of ours → the paper's name. Our offline GSM8K, ShareGPT and LitBench are stand-ins for the paper's data sets.
TASKS = {
    "humaneval": "HumanEval",
    "humaneval_hub": "HumanEval",
    "sharegpt": "ShareGPT",
    "sharegpt_hub": "ShareGPT",
    "gsm8k": "GSM8K",
    "gsm8k_hub": "GSM8K",
    "litbench": "LitBench",
    "litbench_hub": "LitBench",
}

BY_TASK = {
    "HumanEval": {"tokens_per_s": 124.7, "over_hydra": 1.140},
    "ShareGPT": {"tokens_per_s": 117.5, "over_hydra": 1.078},
}

OVER_TASKS = {
    "over_ar": (3.13, 3.47),
    "over_hydra": (1.09, 1.15),
    "over_medusa": (None, 1.36),
}

STAR_GAIN_PERCENT = (0.5, 2.1)  # EntMTP-τ over the best static tree of the task, most on GSM8K
DELTA_NATS = 0.02  # perplexity stays within this of the base model
SWITCH_MS = 0.1  # switching takes less than this per step

# Released logs: 63-node tree, greedy: (mean num_accepted, mean base entropy in nats); LitBench as a range over runs
ENTROPY = {
    "HumanEval": (2.78, 0.36),
    "GSM8K": (2.76, 0.34),
    "ShareGPT": (2.46, 0.60),
    "LitBench": ((2.25, 2.32), (0.81, 0.83)),
}
