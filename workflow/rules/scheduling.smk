# `snakemake scheduling`: what the run's schedulers gained and what there was to gain, by replay of a finished run
JUDGED_POLICIES = [name for name, policy in POLICY_CFG.items() if policy.heads in (None, JUDGED_KIND)]


rule scheduling:
    input:
        parts=expand(f"{SCIENCE}/{{task}}.json", task=TASKS),
        latency=f"{RUN}/latency/{JUDGED_KIND}.json",
        banks=expand(f"{RUN}/trees/{JUDGED_KIND}/{{task}}/bank.json", task=TASKS),
        throughput=expand(f"{RUN}/trees/{JUDGED_KIND}/{{task}}/throughput.json", task=TASKS),
        test=expand(f"{RUN}/traces/{JUDGED_KIND}/{{task}}.test.parquet", task=TASKS),
        growth=judged_growth(TASKS),
    output:
        record=f"{RUN}/scheduling.json",
        markdown=scheduling_report("scheduling.md"),
        headroom=scheduling_report("headroom.png"),
        prediction=scheduling_report("prediction.png"),
        vectors=multiext(f"{SCIENCE}/", "headroom.svg", "prediction.svg"),
    log:
        f"{LOGS}/scheduling/all.log",
    conda:
        "../../environment.yml"
    params:
        policies=JUDGED_POLICIES,
        plot=PLAIN["plot"],
        config=measured_config(),
        bootstrap=CFG.bench.bootstrap,
        seed=CFG.seed,
        threads=CFG.threads,
    script:
        "../scripts/scheduling.py"


rule scheduling_task:
    input:
        calib=f"{RUN}/traces/{JUDGED_KIND}/{{task}}.calib.parquet",
        test=f"{RUN}/traces/{JUDGED_KIND}/{{task}}.test.parquet",
        growth=lambda wildcards: judged_growth([wildcards.task]),
        calib_growth=lambda wildcards: judged_growth([wildcards.task], "calib"),
        recalibrated=f"{RUN}/trees/{JUDGED_KIND}/{{task}}/recalibrated.json",
        throughput=f"{RUN}/trees/{JUDGED_KIND}/{{task}}/throughput.json",
        latency=f"{RUN}/latency/{JUDGED_KIND}.json",
        bank=f"{RUN}/trees/{JUDGED_KIND}/{{task}}/bank.json",
        policies=lambda wildcards: [policy_path(wildcards.task, name) for name in JUDGED_POLICIES],
        bench=f"{RUN}/bench/{{task}}.parquet",
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
    output:
        part=f"{SCIENCE}/{{task}}.json",
    log:
        f"{LOGS}/scheduling/{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        task="{task}",
        bootstrap=CFG.bench.bootstrap,
        seed=CFG.seed,
        bank_size=CFG.scheduling.bank_trees,
        bank_tries=CFG.scheduling.bank_tries,
        threads=CFG.threads,
    script:
        "../scripts/scheduling_task.py"
