# The second method: the target distils itself into emitting several tokens a forward (`confadapt.enabled`)
SECOND = f"{RUN}/confadapt"


rule distill:
    input:
        target=MODEL,
        prompts=per_task("prompts/{task}.jsonl"),
        texts=per_task("texts/{task}.calib.parquet"),
    output:
        model=f"{RUN}/distill/{CFG.distill.name}/config.json",
        history=f"{RUN}/distill/{CFG.distill.name}.json",
    log:
        f"{LOGS}/distill.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    params:
        **base(),
        distill=PLAIN["distill"],
    script:
        "../scripts/distill.py"


rule confadapt:
    input:
        model=rules.distill.output.model,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
    output:
        rows=f"{SECOND}/{{task}}.parquet",
    log:
        f"{LOGS}/confadapt/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
    params:
        **base(),
        confadapt=block_rules(),
        decoding=PLAIN["decoding"],
    script:
        "../scripts/confadapt.py"


rule confadapt_judged:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        rows=f"{SECOND}/{{task}}.parquet",
        bench=f"{RUN}/bench/{{task}}.parquet",
        summary=f"{RUN}/summary.json",
    output:
        part=f"{SECOND}/{{task}}.json",
    log:
        f"{LOGS}/confadapt/{{task}}.judged.log",
    conda:
        "../../environment.yml"
    params:
        **base(),
        task="{task}",
        scoring=lambda wildcards: TASK_CFG[wildcards.task].scoring,
        code=lambda wildcards: code_block(wildcards.task),
        bootstrap=CFG.bench.bootstrap,
        seed=CFG.seed,
    script:
        "../scripts/confadapt_judged.py"


rule confadapt_report:
    input:
        parts=expand(f"{SECOND}/{{task}}.json", task=TASKS),
        history=rules.distill.output.history,
    output:
        record=f"{RUN}/confadapt.json",
        table=f"{SECOND}/confadapt.md",
        figure=f"{SECOND}/frontier.png",
        vector=f"{SECOND}/frontier.svg",
    log:
        f"{LOGS}/confadapt/report.log",
    conda:
        "../../environment.yml"
    params:
        plot=PLAIN["plot"],
        block={**PLAIN["target"], "dtype": CFG.dtype, "device": CFG.device},
        threads=CFG.threads,
    script:
        "../scripts/confadapt_report.py"
