from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.throughput)  # noqa: F821
