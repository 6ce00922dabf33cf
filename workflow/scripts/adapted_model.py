from entmtp.stages import distill, run_rule

run_rule(snakemake, distill.adapted_model)  # noqa: F821
