# Stage 8: one machine-readable summary, then tables, figures and the report from it
rule summary:
    input:
        bench=per_task("bench/{task}.parquet"),
        lossless=per_task("checks/lossless/{task}.json"),
        replay=per_task("checks/replay/{task}.json"),
        perplexity=per_task("perplexity/{task}.json"),
        prompts=per_task("prompts/{task}.jsonl"),
        latency=expand(f"{RUN}/latency/{{heads}}.json", heads=CALIBRATED),
    output:
        summary=f"{RUN}/summary.json",
    log:
        f"{LOGS}/summary.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        tasks=TASKS,
        policies=POLICIES,
        bench=PLAIN["bench"],
        tasks_config={task: to_plain(TASK_CFG[task]) for task in TASKS},
        config=measured_config(),
        threads=CFG.threads,
    script:
        "../scripts/summary.py"


rule resolved_config:
    output:
        config=f"{RUN}/config.yaml",
    log:
        f"{LOGS}/resolved_config.log",
    conda:
        "../../environment.yml"
    params:
        config=PLAIN,
        overrides=split_overrides(config.get("overrides", "")),
        tasks_config={task: to_plain(TASK_CFG[task]) for task in TASKS},
        policies_config={name: to_plain(cfg) for name, cfg in POLICY_CFG.items()},
        heads_config={kind: to_plain(HEADS_CFG[kind]) for kind in USED},
        threads=CFG.threads,
    script:
        "../scripts/resolved_config.py"


rule tables:
    input:
        summary=f"{RUN}/summary.json",
    output:
        reported("tables", TABLES, "csv", "Tables"),
        expand(f"{RUN}/tables/{{table}}.{{kind}}", table=TABLES, kind=("md", "tex")),
    log:
        f"{LOGS}/tables.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        threads=CFG.threads,
    script:
        "../scripts/tables.py"


rule figures:
    input:
        summary=f"{RUN}/summary.json",
        throughput=expand(f"{RUN}/trees/{{heads}}/{{task}}/throughput.json", heads=CALIBRATED, task=TASKS),
        banks=expand(f"{RUN}/trees/{{heads}}/{{task}}/bank.json", heads=CALIBRATED, task=TASKS),
        latency=expand(f"{RUN}/latency/{{heads}}.json", heads=CALIBRATED),
        bench=per_task("bench/{task}.parquet"),
        traces=expand(f"{RUN}/traces/{{heads}}/{{task}}.test.parquet", heads=CALIBRATED, task=TASKS),
    output:
        reported("figures", FIGURES, "png", "Figures"),
        expand(f"{RUN}/figures/{{figure}}.svg", figure=FIGURES),
    log:
        f"{LOGS}/figures.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        tasks=TASKS,
        heads=CALIBRATED,
        plot=PLAIN["plot"],
        threads=CFG.threads,
    script:
        "../scripts/figures.py"


rule report:
    input:
        summary=f"{RUN}/summary.json",
        config=f"{RUN}/config.yaml",
        figures=expand(f"{RUN}/figures/{{figure}}.png", figure=FIGURES),
        tables=expand(f"{RUN}/tables/{{table}}.md", table=TABLES),
        scheduling=scheduling_shown,
        second=second_shown,
    output:
        report=f"{RUN}/report.html",
    log:
        f"{LOGS}/report.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        threads=CFG.threads,
    script:
        "../scripts/report.py"


rule replay_generation:
    input:
        generation=f"{RUN}/generation.json",
        config=f"{RUN}/config.yaml",
    output:
        page=f"{RUN}/replay_generation.html",
    log:
        f"{LOGS}/replay_generation.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        threads=CFG.threads,
    script:
        "../scripts/replay_generation.py"


rule publish:
    input:
        summary=f"{RUN}/summary.json",
        report=f"{RUN}/report.html",
        replay=f"{RUN}/replay_generation.html",
        config=f"{RUN}/config.yaml",
        tables=expand(f"{RUN}/tables/{{table}}.{{kind}}", table=TABLES, kind=("csv", "md", "tex")),
        figures=expand(f"{RUN}/figures/{{figure}}.{{kind}}", figure=FIGURES, kind=("png", "svg")),
    output:
        published(),
        expand(f"{CFG.results}/tables/{{table}}.{{kind}}", table=TABLES, kind=("csv", "md", "tex")),
        expand(f"{CFG.results}/figures/{{figure}}.{{kind}}", figure=FIGURES, kind=("png", "svg")),
    log:
        f"{LOGS}/publish.log",
    conda:
        "../../environment.yml"
    params:
        run=lambda wildcards: RUN,
        results=lambda wildcards: CFG.results,
        threads=CFG.threads,
    script:
        "../scripts/publish.py"
