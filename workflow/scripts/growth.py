from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.growth)  # noqa: F821
