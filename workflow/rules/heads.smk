# Draft heads: made (shipped ones need no rule), and judged by `snakemake heads` on prompts that nothing learned from.
# `overrides="heads.source=train"` trains the configured kinds into the run folder first.
JUDGED = f"{RUN}/heads/eval"
TRAINED = CFG.heads.source == "train"
SELF_PROMPT_KEYS = ("self_prompts", "self_prompt_tokens", "self_temperature", "batch", "seed")


rule heads:
    input:
        f"{RUN}/heads.json",


rule heads_eval_texts:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
    output:
        texts=f"{JUDGED}/{{task}}.texts.parquet",
    log:
        f"{LOGS}/heads/eval_texts_{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        gpu=GPU,
    params:
        **base(),
        decoding=PLAIN["decoding"],
        split="test",
    script:
        "../scripts/texts.py"


rule heads_eval:
    input:
        target=MODEL,
        prompts=f"{RUN}/prompts/{{task}}.jsonl",
        texts=f"{JUDGED}/{{task}}.texts.parquet",
        heads=lambda wildcards: heads_config(wildcards.heads),
        traces=f"{RUN}/traces/{{heads}}/{{task}}.calib.parquet",
        recalibrated=f"{RUN}/trees/{{heads}}/{{task}}/recalibrated.json",
        latency=f"{RUN}/latency/{{heads}}.json",
    output:
        rows=f"{JUDGED}/{{heads}}/{{task}}.json",
    log:
        f"{LOGS}/heads/eval_{{heads}}_{{task}}.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        kind="{heads}",
        task="{task}",
        decoding=PLAIN["decoding"],
        bench={key: PLAIN["bench"][key] for key in ("tie_margin", "bootstrap")},
        heads=lambda wildcards: heads_block(wildcards.heads),
        seed=CFG.seed,
        repeats=CFG.latency.repeats,
        live_prompts=CFG.heads_live_prompts,
    script:
        "../scripts/heads_eval.py"


rule heads_report:
    input:
        rows=expand(f"{JUDGED}/{{heads}}/{{task}}.json", heads=CFG.heads_trained, task=CFG.heads_tasks),
        latency=f"{RUN}/latency/{CFG.heads_trained[0]}.json",
    output:
        report=f"{RUN}/heads.json",
    log:
        f"{LOGS}/heads/report.log",
    conda:
        "../../environment.yml"
    params:
        size=16,
        config=measured_config(),
        threads=CFG.threads,
    script:
        "../scripts/heads_report.py"


# by the heads' own training text where they are trained here, else by their vocabulary and the tasks' texts
rule heads_vocabulary:
    input:
        target=MODEL,
        features=expand(f"{RUN}/heads/features/{{shard}}.safetensors", shard=SHARDS) if TRAINED else [],
        heads=[] if TRAINED else heads_config(CFG.heads.name),
        texts=[] if TRAINED else expand(f"{RUN}/texts/{{task}}.calib.parquet", task=CFG.heads_tasks),
    output:
        curve=f"{RUN}/heads/vocabulary.json",
    log:
        f"{LOGS}/heads/vocabulary.log",
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        device=1,
        gpu=GPU,
    params:
        **base(),
        heads=heads_block(CFG.heads.name),
        tasks=[] if TRAINED else CFG.heads_tasks,
        repeats=CFG.latency.repeats,
    script:
        "../scripts/heads_vocabulary.py"


rule heads_vocabulary_figure:
    input:
        curve=f"{RUN}/heads/vocabulary.json",
    output:
        figure=multiext(f"{RUN}/heads/vocabulary", ".png", ".svg"),
    log:
        f"{LOGS}/heads/vocabulary_figure.log",
    conda:
        "../../environment.yml"
    params:
        plot=PLAIN["plot"],
        threads=CFG.threads,
    script:
        "../scripts/heads_vocabulary_figure.py"


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
        resources:
            gpu=GPU,
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

    rule heads_prompts:
        input:
            target=MODEL,
        output:
            prompts=f"{RUN}/heads/self_prompts.jsonl",
        log:
            f"{LOGS}/heads/prompts.log",
        conda:
            "../../environment.yml"
        threads: workflow.cores
        resources:
            gpu=GPU,
        params:
            **{**base(), "dtype": CFG.corpus.dtype},
            corpus={key: PLAIN["corpus"][key] for key in SELF_PROMPT_KEYS},
        script:
            "../scripts/heads_prompts.py"

    rule heads_text:
        input:
            target=MODEL,
            self_prompts=rules.heads_prompts.output if CFG.corpus.self_prompts else [],
            prompts=kept_out(),
            sources=corpus_sources(),
        output:
            text=f"{RUN}/heads/text/{{shard}}.jsonl",
        log:
            f"{LOGS}/heads/text_{{shard}}.log",
        conda:
            "../../environment.yml"
        threads: workflow.cores
        resources:
            gpu=GPU,
        params:
            **{**base(), "dtype": CFG.corpus.dtype},
            corpus=lambda wildcards: PLAIN["corpus"],
            shard=lambda wildcards: int(wildcards.shard),
        script:
            "../scripts/heads_text.py"

    rule heads_features:
        input:
            target=MODEL,
            text=f"{RUN}/heads/text/{{shard}}.jsonl",
        output:
            features=f"{RUN}/heads/features/{{shard}}.safetensors",
        log:
            f"{LOGS}/heads/features_{{shard}}.log",
        conda:
            "../../environment.yml"
        threads: workflow.cores
        resources:
            gpu=GPU,
        params:
            **{**base(), "dtype": CFG.corpus.dtype},
            corpus={key: PLAIN["corpus"][key] for key in ("top_k", "held_out")},
        script:
            "../scripts/heads_features.py"

    rule train_heads:
        input:
            target=MODEL,
            self_prompts=rules.heads_prompts.output if CFG.corpus.self_prompts else [],
            prompts=kept_out(),
            texts=expand(f"{RUN}/heads/text/{{shard}}.jsonl", shard=SHARDS),
            features=expand(f"{RUN}/heads/features/{{shard}}.safetensors", shard=SHARDS),
        output:
            heads=f"{RUN}/heads/{{heads}}/config.json",
        log:
            f"{LOGS}/heads/{{heads}}.log",
        conda:
            "../../environment.yml"
        threads: workflow.cores
        resources:
            gpu=GPU,
        params:
            **{**base(), "dtype": CFG.corpus.dtype},
            heads=lambda wildcards: to_plain(HEADS_CFG[wildcards.heads]),
            corpus=lambda wildcards: PLAIN["corpus"],
            # asking for `output` keeps it out of what Snakemake compares: other overrides train nothing again
            command=lambda wildcards, output: heads_command(),
        script:
            "../scripts/train_heads.py"
