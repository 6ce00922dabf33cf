from entmtp.stages import distill, run_rule

run_rule(snakemake, distill.confadapt_check)  # noqa: F821
