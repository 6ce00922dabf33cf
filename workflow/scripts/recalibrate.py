from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.recalibrate)  # noqa: F821
