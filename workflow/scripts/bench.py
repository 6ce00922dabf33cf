from entmtp.stages import online, run_rule

run_rule(snakemake, online.bench)  # noqa: F821
