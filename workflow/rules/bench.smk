# Stage 7: timed runs of all policies of a task side by side, and the checks that their result stands on
ARMS = {name: policy.heads for name, policy in POLICY_CFG.items()}
BENCH = dict(
    run=lambda wildcards: RUN,
    arms=ARMS,
    kinds={kind: heads_block(kind) for kind in USED},
    heads_folders=lambda wildcards: {kind: str(Path(heads_config(kind)).parent) for kind in USED},
)
BANKS = f"{RUN}/trees/{{heads}}/{{task}}/bank.json"


rule bench:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        heads=[heads_config(kind) for kind in USED],
        policies=lambda wildcards: [policy_path(wildcards.task, name) for name in POLICIES],
        banks=lambda wildcards: bank_paths(wildcards.task),
    output:
        bench=f"{RUN}/bench/{{task}}.parquet",
    log:
        f"{LOGS}/bench/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        **BENCH,
        bench={key: PLAIN["bench"][key] for key in ("warmup_tokens",)},
        decoding=PLAIN["decoding"],
        task="{task}",
    script:
        "../scripts/bench.py"


rule check_lossless:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        bench=f"{RUN}/bench/{{task}}.parquet",
    output:
        check=f"{RUN}/checks/lossless/{{task}}.json",
    log:
        f"{LOGS}/check_lossless/{{task}}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        decoding=PLAIN["decoding"],
        bench={"tie_margin": PLAIN["bench"]["tie_margin"]},
        task="{task}",
    script:
        "../scripts/check_lossless.py"


rule check_replay:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        bench=f"{RUN}/bench/{{task}}.parquet",
        policies=lambda wildcards: [policy_path(wildcards.task, name) for name in POLICIES],
        banks=lambda wildcards: bank_paths(wildcards.task),
        heads=[heads_config(kind) for kind in USED],
    output:
        check=f"{RUN}/checks/replay/{{task}}.json",
        traces=[f"{RUN}/traces/{kind}/{{task}}.test.parquet" for kind in USED],
        growth=[f"{RUN}/traces/{kind}/{{task}}.test.growth.npz" for kind in GROWN],
    log:
        f"{LOGS}/check_replay/{{task}}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        **BENCH,
        growing=GROWN,
        growth=PLAIN["growth"],
        decoding=PLAIN["decoding"],
        bench={"tie_margin": PLAIN["bench"]["tie_margin"]},
        task="{task}",
    script:
        "../scripts/check_replay.py"


rule record_generation:
    input:
        target=MODEL,
        prompts=per_task("prompts/{task}.jsonl"),
        heads=[heads_config(kind) for kind in USED],
        bench=per_task("bench/{task}.parquet"),
        policies=[policy_path(task, name) for task in TASKS for name in POLICIES],
        banks=[path for task in TASKS for path in bank_paths(task)],
        traces=expand(f"{RUN}/traces/{{heads}}/{{task}}.test.parquet", heads=USED, task=TASKS),
    output:
        generation=f"{RUN}/generation.json",
    log:
        f"{LOGS}/record_generation.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        gpu=GPU,
    params:
        **base(),
        **BENCH,
        tasks=TASKS,
        decoding=PLAIN["decoding"],
        replayed=PLAIN["replayed"],
    script:
        "../scripts/record_generation.py"


rule perplexity:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        bench=f"{RUN}/bench/{{task}}.parquet",
    output:
        perplexity=f"{RUN}/perplexity/{{task}}.json",
    log:
        f"{LOGS}/perplexity/{{task}}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        task="{task}",
    script:
        "../scripts/perplexity.py"


rule track:
    input:
        bench=f"{RUN}/bench/{{task}}.parquet",
        summary=f"{RUN}/summary.json",
        figures=expand(f"{RUN}/figures/{{figure}}.png", figure=FIGURES),
        files=tracked_files,
        traces=expand(f"{RUN}/traces/{{heads}}/{{{{task}}}}.test.parquet", heads=CALIBRATED),
    output:
        tracking=f"{RUN}/tracking/{{task}}.json",
    log:
        f"{LOGS}/track/{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        tracking=PLAIN["tracking"],
        config=PLAIN,
        task="{task}",
        threads=CFG.threads,
    script:
        "../scripts/track.py"


rule track_record:
    input:
        record=f"{RUN}/{{record}}.json",
        summary=f"{RUN}/summary.json",
    output:
        tracking=f"{RUN}/tracking/records/{{record}}.json",
    log:
        f"{LOGS}/track_record/{{record}}.log",
    wildcard_constraints:
        record="scheduling|confadapt",
    conda:
        "../../environment.yml"
    params:
        tracking=PLAIN["tracking"],
        config=PLAIN,
        threads=CFG.threads,
    script:
        "../scripts/track_record.py"
