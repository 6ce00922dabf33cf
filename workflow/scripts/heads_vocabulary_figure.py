from entmtp.stages import heads, run_rule

run_rule(snakemake, heads.heads_vocabulary_figure)  # noqa: F821
