from entmtp.stages import heads, run_rule

run_rule(snakemake, heads.train_heads)  # noqa: F821
