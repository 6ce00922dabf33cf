from entmtp.stages import run_rule, science

run_rule(snakemake, science.scheduling)  # noqa: F821
