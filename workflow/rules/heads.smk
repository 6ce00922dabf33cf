# Draft heads. Shipped heads need no rule; `snakemake heads` trains the configured kinds into the run folder.


rule heads:
    input:
        expand(f"{RUN}/heads/{{heads}}/config.json", heads=CFG.heads_trained),


if CFG.heads.source == "random":

    rule random_heads:
        input:
            target=MODEL,
        output:
            heads=f"{RUN}/heads/{{heads}}/config.json",
        log:
            f"{LOGS}/heads/{{heads}}.log",
        conda:
            "../../environment.yml"
        params:
            **base(),
            heads=lambda wildcards: to_plain(HEADS_CFG[wildcards.heads]),
        script:
            "../scripts/random_heads.py"

elif CFG.heads.source == "hub":

    rule convert_heads:
        input:
            target=MODEL,
        output:
            heads=f"{RUN}/heads/{{heads}}/config.json",
        log:
            f"{LOGS}/heads/{{heads}}.log",
        conda:
            "../../environment.yml"
        params:
            **base(),
            heads=lambda wildcards: to_plain(HEADS_CFG[wildcards.heads]),
        script:
            "../scripts/convert_heads.py"

else:

    rule train_heads:
        input:
            target=MODEL,
            prompts=expand(f"{RUN}/prompts/{{task}}.jsonl", task=TASKS),
        output:
            heads=f"{RUN}/heads/{{heads}}/config.json",
        log:
            f"{LOGS}/heads/{{heads}}.log",
        conda:
            "../../environment.yml"
        # one at a time: all kinds share the generated text and its journal
        threads: workflow.cores
        params:
            **{**base(), "dtype": CFG.heads.train.text_dtype},
            heads=lambda wildcards: to_plain(HEADS_CFG[wildcards.heads]),
        script:
            "../scripts/train_heads.py"
