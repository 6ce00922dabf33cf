# Stage 2: the target's own continuations of the calibration prompts, and one teacher-forced pass over them


rule texts:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
    output:
        texts=f"{RUN}/texts/{{task}}.calib.parquet",
    log:
        f"{LOGS}/texts/{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        gpu=GPU,
    params:
        **base(),
        decoding=PLAIN["decoding"],
        split="calib",
    script:
        "../scripts/texts.py"


rule traces:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        texts=f"{RUN}/texts/{{task}}.calib.parquet",
        heads=lambda wildcards: heads_config(wildcards.heads),
    output:
        traces=f"{RUN}/traces/{{heads}}/{{task}}.calib.parquet",
    log:
        f"{LOGS}/traces/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        decoding=PLAIN["decoding"],
        bench={"tie_margin": PLAIN["bench"]["tie_margin"]},
        heads=lambda wildcards: heads_block(wildcards.heads),
    script:
        "../scripts/traces.py"


rule growth:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        texts=f"{RUN}/texts/{{task}}.calib.parquet",
        heads=lambda wildcards: heads_config(wildcards.heads),
    output:
        growth=f"{RUN}/traces/{{heads}}/{{task}}.calib.growth.npz",
    log:
        f"{LOGS}/growth/{{heads}}/{{task}}.log",
    conda:
        "../../environment.yml"
    resources:
        gpu=GPU,
    params:
        **base(),
        growth=PLAIN["growth"],
        heads=lambda wildcards: heads_block(wildcards.heads),
    script:
        "../scripts/growth.py"
