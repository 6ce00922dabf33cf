from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.train_heads)  # noqa: F821
