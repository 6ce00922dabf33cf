from entmtp.stages import online, run_rule

run_rule(snakemake, online.record_generation)  # noqa: F821
