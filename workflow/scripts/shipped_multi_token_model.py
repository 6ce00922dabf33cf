from entmtp.stages import distill, run_rule

run_rule(snakemake, distill.shipped_multi_token_model)  # noqa: F821
