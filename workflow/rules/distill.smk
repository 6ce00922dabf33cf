# The second method: the target distils itself into emitting several tokens a forward (`confadapt.enabled`)
SECOND = f"{RUN}/confadapt"


rule distill_prompts:
    input:
        target=MODEL,
        prompts=per_task("prompts/{task}.jsonl"),
        source=task_source,
    output:
        prompts=f"{RUN}/distill/prompts/{{task}}.jsonl",
    log:
        f"{LOGS}/distill/prompts_{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        task=task_block,
        size=lambda wildcards: CFG.distill.prompts[wildcards.task],
        target=PLAIN["target"],
        resources=lambda wildcards: CFG.resources,
        threads=CFG.threads,
    script:
        "../scripts/distill_prompts.py"


rule distill_texts:
    input:
        target=MODEL,
        prompts=f"{RUN}/distill/prompts/{{task}}.jsonl",
    output:
        texts=f"{RUN}/distill/texts/{{task}}.jsonl",
    log:
        f"{LOGS}/distill/texts_{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        gpu=GPU,
    params:
        **{**base(), "dtype": CFG.distill.dtype},
        max_new_tokens=CFG.decoding.max_new_tokens,
        batch=CFG.distill.text_batch,
    script:
        "../scripts/distill_texts.py"


rule distill:
    input:
        target=MODEL,
        texts=expand(f"{RUN}/distill/texts/{{task}}.jsonl", task=CFG.distill.prompts),
    output:
        model=f"{RUN}/distill/{CFG.distill.name}/config.json",
        history=f"{RUN}/distill/{CFG.distill.name}.json",
    log:
        f"{LOGS}/distill.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        gpu=GPU,
    params:
        **base(),
        distill={k: v for k, v in PLAIN["distill"].items() if k not in ("prompts", "text_batch")},
    script:
        "../scripts/distill.py"


if CFG.mtp.source == "hub":

    rule multi_token_model:
        output:
            target=MTP,
        log:
            f"{LOGS}/multi_token_model.log",
        conda:
            "../../environment.yml"
        params:
            mtp=source_of(PLAIN["mtp"]),
            resources=lambda wildcards: CFG.resources,
            threads=CFG.threads,
        script:
            "../scripts/multi_token_model.py"


if CFG.mtp.source == "adapter":

    rule adapted_model:
        input:
            target=MODEL,
            adapter=expand(f"{CFG.mtp.path}/{{file}}", file=["config.json", "adapter.safetensors"]),
        output:
            model=MTP,
        log:
            f"{LOGS}/adapted_model.log",
        conda:
            "../../environment.yml"
        params:
            threads=CFG.threads,
        script:
            "../scripts/adapted_model.py"


rule confadapt_latency:
    input:
        target=MODEL,
        model=MTP,
    output:
        latency=f"{SECOND}/latency/forwards.json",
    log:
        f"{LOGS}/confadapt/latency.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        **multi_token_block(),
        latency={key: PLAIN["latency"][key] for key in ("sizes", "contexts", "repeats")},
        confadapt={"lossless": PLAIN["confadapt"]["lossless"]},
    script:
        "../scripts/confadapt_latency.py"


rule confadapt:
    input:
        target=MODEL,
        model=MTP,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        latency=rules.confadapt_latency.output.latency,
    output:
        rows=f"{SECOND}/{{task}}.parquet",
    log:
        f"{LOGS}/confadapt/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        **multi_token_block(),
        confadapt=block_rules(),
        decoding=PLAIN["decoding"],
        task="{task}",
    script:
        "../scripts/confadapt.py"


rule confadapt_check:
    input:
        target=MODEL,
        model=MTP,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        rows=f"{SECOND}/{{task}}.parquet",
    output:
        check=f"{SECOND}/{{task}}.lossless.json",
    log:
        f"{LOGS}/confadapt/{{task}}.check.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        **multi_token_block(),
        confadapt={"lossless": PLAIN["confadapt"]["lossless"]},
        bench={"tie_margin": PLAIN["bench"]["tie_margin"]},
        task="{task}",
    script:
        "../scripts/confadapt_check.py"


rule confadapt_judged:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        rows=f"{SECOND}/{{task}}.parquet",
        check=f"{SECOND}/{{task}}.lossless.json",
        bench=f"{RUN}/bench/{{task}}.parquet",
        summary=f"{RUN}/summary.json",
    output:
        part=f"{SECOND}/{{task}}.json",
    log:
        f"{LOGS}/confadapt/{{task}}.judged.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
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
        **training_history(),
        parts=expand(f"{SECOND}/{{task}}.json", task=TASKS),
        latency=rules.confadapt_latency.output.latency,
    output:
        **training_figures(),
        record=f"{RUN}/confadapt.json",
        table=second_report("confadapt.md"),
        figure=second_report("frontier.png"),
        vector=f"{SECOND}/frontier.svg",
    log:
        f"{LOGS}/confadapt/report.log",
    conda:
        "../../environment.yml"
    params:
        plot=PLAIN["plot"],
        mtp=PLAIN["mtp"],
        config=measured_config(),
        threads=CFG.threads,
    script:
        "../scripts/confadapt_report.py"
