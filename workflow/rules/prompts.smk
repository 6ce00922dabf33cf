# Stage 1: the target, and the prompts of every task in a calibration and a test split


if CFG.target.source != "folder":

    rule target:
        output:
            target=MODEL,
        log:
            f"{LOGS}/target.log",
        conda:
            "../../environment.yml"
        params:
            target=source_of(PLAIN["target"]),
            resources=lambda wildcards: CFG.resources,
            threads=CFG.threads,
        script:
            "../scripts/target.py"


rule prompts:
    input:
        target=MODEL,
        source=task_source,
    output:
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
    log:
        f"{LOGS}/prompts/{{task}}.log",
    conda:
        "../../environment.yml"
    params:
        task=task_block,
        target=PLAIN["target"],
        resources=lambda wildcards: CFG.resources,
        threads=CFG.threads,
    script:
        "../scripts/prompts.py"
