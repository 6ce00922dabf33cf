from entmtp.stages import online, run_rule

run_rule(snakemake, online.check_replay)  # noqa: F821
