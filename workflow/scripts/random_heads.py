from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.random_heads)  # noqa: F821
