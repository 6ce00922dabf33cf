from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.latency)  # noqa: F821
