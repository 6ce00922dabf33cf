# Stages 3 to 6: frontier, recalibration, latency table, throughput, bank, policies
TREES = f"{RUN}/trees/{{heads}}/{{task}}"
ROLLOUT = CFG.search.engine == "rollout"


rule frontier:
    input:
        target=MODEL,
        traces=f"{RUN}/traces/{{heads}}/{{task}}.calib.parquet",
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        heads=lambda wildcards: heads_config(wildcards.heads),
    output:
        frontier=f"{TREES}/frontier.json",
    log:
        f"{LOGS}/frontier/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores if ROLLOUT else 1
    resources:
        gpu=GPU if ROLLOUT else None,
    params:
        **base(),
        search=PLAIN["search"],
        decoding=PLAIN["decoding"],
        heads=lambda wildcards: heads_block(wildcards.heads),
    script:
        "../scripts/frontier.py"


rule recalibrate:
    input:
        traces=f"{RUN}/traces/{{heads}}/{{task}}.calib.parquet",
        frontier=f"{TREES}/frontier.json",
    output:
        recalibrated=f"{TREES}/recalibrated.json",
    log:
        f"{LOGS}/recalibrate/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        task="{task}",
        kind="{heads}",
        threads=CFG.threads,
    script:
        "../scripts/recalibrate.py"


# Timed rules own the machine: they take every core, so that nothing runs beside them.
rule latency:
    input:
        target=MODEL,
        heads=lambda wildcards: heads_config(wildcards.heads),
    output:
        latency=f"{RUN}/latency/{{heads}}.json",
    log:
        f"{LOGS}/latency/{{heads}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        latency=PLAIN["latency"],
        decoding=PLAIN["decoding"],
        heads=lambda wildcards: heads_block(wildcards.heads),
    script:
        "../scripts/latency.py"


rule throughput:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        traces=f"{RUN}/traces/{{heads}}/{{task}}.calib.parquet",
        recalibrated=f"{TREES}/recalibrated.json",
        latency=f"{RUN}/latency/{{heads}}.json",
        heads=lambda wildcards: heads_config(wildcards.heads),
    output:
        throughput=f"{TREES}/throughput.json",
    log:
        f"{LOGS}/throughput/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        bank={key: PLAIN["bank"][key] for key in ("shortlist", "prompts", "max_new_tokens")},
        decoding=PLAIN["decoding"],
        heads=lambda wildcards: heads_block(wildcards.heads),
        task="{task}",
        kind="{heads}",
        seed=CFG.seed,
    script:
        "../scripts/throughput.py"


rule bank:
    input:
        throughput=f"{TREES}/throughput.json",
    output:
        bank=f"{TREES}/bank.json",
    log:
        f"{LOGS}/bank/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        bank=PLAIN["bank"],
        task="{task}",
        kind="{heads}",
        threads=CFG.threads,
    script:
        "../scripts/bank.py"


rule policy:
    input:
        unpack(policy_inputs),
    output:
        policy=f"{TREES}/policy/{{policy}}.json",
    log:
        f"{LOGS}/policy/{{heads}}/{{task}}/{{policy}}.log",
    conda:
        "../../environment.yml"
    params:
        policy=lambda wildcards: to_plain(POLICY_CFG[wildcards.policy]),
        threads=CFG.threads,
    script:
        "../scripts/policy.py"
