from entmtp.stages import offline, run_rule

run_rule(snakemake, offline.texts)  # noqa: F821
