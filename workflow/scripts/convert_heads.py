from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.convert_heads)  # noqa: F821
